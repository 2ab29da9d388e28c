// The search of the manual's edition in files: the same answers as `cyborgweb.help.site.find` gives on a server.
(function () {
  const term = (new URLSearchParams(location.search).get("q") || "").trim().slice(0, 200);
  const words = term.toLowerCase().split(/\s+/).filter(Boolean), place = document.getElementById("found");
  const within = (word, ...texts) => texts.some(text => text.toLowerCase().includes(word));
  const heading = hit => words.filter(word => within(word, hit[1], hit[2])).length;
  const hits = words.length ? MANUAL.filter(hit => words.every(word => within(word, hit[1], hit[2], hit[3]))) : [];
  hits.sort((one, other) => heading(other) - heading(one));

  function make(name, text, ...inside) {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    made.append(...inside);
    return made;
  }

  function excerpt(text) {
    const at = Math.min(...words.map(word => text.toLowerCase().indexOf(word)).map(found => found < 0 ? Infinity : found));
    const start = Number.isFinite(at) ? Math.max(0, text.lastIndexOf(" ", Math.max(0, at - 60))) : 0;
    return (start ? "…" : "") + text.slice(start, start + 220).trim() + (start + 220 < text.length ? "…" : "");
  }

  document.getElementById("find").value = term;
  const said = make("p", hits.length ? `${Math.min(hits.length, 40)} sections with “${term}”` : term ? `No section has all of “${term}”. Fewer words find more.` : "Type what you look for into the field above.");
  said.setAttribute("role", "status");
  const list = make("ol", "", ...hits.slice(0, 40).map(hit => {
    const link = make("a", hit[2]), page = make("span", hit[1]);
    link.href = hit[0];
    page.className = "faint";
    return make("li", "", link, " ", page, make("p", excerpt(hit[3])));
  }));
  list.className = "hits";
  place.replaceChildren(said, list);
})();
