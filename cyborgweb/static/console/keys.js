// Keyboard shortcuts. They do nothing while the user types text, or together with Ctrl, Alt or Meta, except Ctrl-K.
// Escape closes what was opened. Everything can also be done without this file.
const PLACES = { o: "Overview", h: "Hosts", d: "Devices", r: "Requests", p: "Device profiles", c: "Commands", e: "Events", i: "Intents", a: "Agents" };
const HELP = [
  ["/", "search everything"], ["Ctrl K", "go to a page by its name"], ["j  k", "next, previous row"], ["Enter", "open that row"],
  ["x", "select that row"], ["a", "to what can be done with the selected"], ["f", "search in this list"], ["?", "this help"], ["Esc", "back"],
  ...Object.entries(PLACES).map(([key, name]) => [`g ${key}`, name]),
];

// The text of an icon is its name in the icon font, so it is not part of a link's name.
const words = piece => piece.matches(".icon, [class*=material-symbols]") ? [] : [...piece.childNodes].filter(node => node.nodeType === Node.TEXT_NODE).map(node => node.data.trim());
const links = () => [...document.querySelectorAll(".groups a, #nav-sidebar a, nav a[href^='/admin/']")]
  .map(link => ({ name: [...link.querySelectorAll("*"), link].flatMap(words).join(" ").trim(), url: link.href }))
  .filter((one, at, all) => one.name && all.findIndex(other => other.url === one.url) === at);
const rows = () => [...document.querySelectorAll("#result_list tr.data-row, main table tbody tr")];
const isTyping = target => target.isContentEditable || target.matches("input:not([type=checkbox]):not([type=radio]), textarea, select");

function make(name, text, ...inside) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...inside);
  return made;
}

function dialog(title, ...inside) {
  const shown = make("dialog", "", make("h2", title), ...inside);
  shown.className = "keys";
  shown.setAttribute("aria-label", title);
  shown.addEventListener("close", () => shown.remove());
  shown.addEventListener("click", event => event.target === shown && shown.close());
  document.body.append(shown);
  shown.showModal();
  return shown;
}

// unfold's pages have no link that skips their navigation.
if (!document.querySelector(".skip")) {
  const skip = make("a", "Skip to content");
  skip.className = "skip";
  skip.href = "#content";
  document.body.prepend(skip);
}

function help() {
  const list = make("dl");
  for (const [keys, what] of HELP) list.append(make("dt", "", make("kbd", keys)), make("dd", what));
  dialog("Keys", list);
}

function palette() {
  const input = make("input"), list = make("ul"), all = links();
  const about = { "aria-label": "Go to, or search for", role: "combobox", "aria-expanded": "true", "aria-controls": "places", "aria-autocomplete": "list" };
  for (const [name, said] of Object.entries(about)) input.setAttribute(name, said);
  list.id = "places";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Pages");
  input.placeholder = "A page's name, or what to search for";
  let at = 0;
  function show() {
    const term = input.value.trim().toLowerCase(), found = all.filter(one => one.name.toLowerCase().includes(term));
    if (term) found.push({ name: `Search for “${input.value.trim()}”`, url: `/admin/find/?q=${encodeURIComponent(input.value.trim())}` });
    at = Math.max(0, Math.min(at, found.length - 1));
    list.replaceChildren(...found.map((one, place) => {
      const link = make("a", one.name);
      link.href = one.url;
      link.id = `place-${place}`;
      link.tabIndex = -1;
      link.setAttribute("role", "option");
      link.setAttribute("aria-selected", String(place === at));
      const item = make("li", "", link);
      item.setAttribute("role", "none");
      return item;
    }));
    input.setAttribute("aria-activedescendant", `place-${at}`);
    list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }
  input.addEventListener("input", () => { at = 0; show(); });
  input.addEventListener("keydown", event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { event.preventDefault(); at += step; show(); }
    if (event.key === "Enter") list.querySelector("[aria-selected=true]")?.click();
  });
  dialog("Go to", input, list);
  show();
  input.focus();
}

function move(step) {
  const all = rows(), now = all.findIndex(row => row.classList.contains("here"));
  const next = all[Math.max(0, Math.min(all.length - 1, now < 0 ? (step > 0 ? 0 : all.length - 1) : now + step))];
  if (!next) return;
  all[now]?.classList.remove("here");
  next.classList.add("here");
  (next.querySelector("a") || next).focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

const here = () => document.querySelector("tr.here");
const ACTS = {
  "/": () => { const box = document.getElementById("find"); box?.focus(); box?.select(); },
  f: () => document.getElementById("searchbar")?.focus(),
  j: () => move(1),
  k: () => move(-1),
  x: () => here()?.querySelector("input[type=checkbox]")?.click(),
  a: () => document.querySelector("select[name=action], .decide button:not([disabled])")?.focus(),
  "?": help,
};

let going = 0;
addEventListener("keydown", event => {
  if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
    if (document.querySelector("dialog[open]")) return;
    event.preventDefault();
    return palette();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    document.querySelectorAll("details.drop[open]").forEach(one => one.removeAttribute("open"));
    if (isTyping(event.target)) event.target.blur();
    return here()?.classList.remove("here");
  }
  if (isTyping(event.target)) return;
  if (going && PLACES[event.key]) {
    const place = links().find(one => one.name === PLACES[event.key]);
    going = clearTimeout(going) || 0;
    if (place) location.assign(place.url);
    return;
  }
  if (event.key === "g") going = setTimeout(() => { going = 0; }, 1500);
  if (!ACTS[event.key]) return;
  event.preventDefault();
  ACTS[event.key]();
}, true);
addEventListener("click", event => {
  document.querySelectorAll("details.drop[open]").forEach(one => one.contains(event.target) || one.removeAttribute("open"));
});
