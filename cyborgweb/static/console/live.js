// Keep the content of this page up to date. The server sends the changed cells of a list over a WebSocket, or tells any
// other page to fetch itself again; after each connection it compares all visible rows. The badge shows "live" only
// while the connection works.
(function () {
  const SILENCE_MS = 18000, PATIENCE_MS = 3000, HIDDEN_MS = 30000, LONGEST_MS = 8000, PIECE_MS = 1000, BEHIND_S = 3, TIMES_MS = 10000;
  const ENDED = { 4401: "signed out, or permissions changed", 4403: "not allowed", 4400: "this page cannot be followed" };
  const list = document.getElementById("changelist");
  const main = document.querySelector("body[data-page] main");
  const place = document.querySelector(".bar, #header-inner");
  if (!place || !(list || main)) return;

  let socket, tries = 0, isLive = false, heard = 0, lastLive = performance.timeOrigin, lostAt = Date.now();
  let ended = "", fresh = 0, held = false, behindSince = 0, fetching, asleep, shown = "";

  const badge = document.createElement("p");
  badge.className = "live";
  badge.setAttribute("role", "status");
  place.append(badge);

  function draw() {
    // A live page that waits to be fetched again says how far it is behind.
    const behind = behindSince ? Math.round((Date.now() - behindSince) / 1000) : 0;
    const at = new Date(lastLive).toISOString().slice(11, 19);
    const [tone, glyph, text] = ended ? ["warn", "▲", `not live: ${ended}`] : isLive ? ["good", "●", behind >= BEHIND_S ? `live, ${behind} s behind` : "live"]
      : Date.now() - lostAt < PATIENCE_MS ? ["busy", "◐", "reconnecting"] : ["warn", "▲", `stale since ${at} UTC`];
    const more = fresh ? `${fresh} new – show` : held ? "changed – show" : ended ? "reload" : "";
    if (shown === text + more) return;
    shown = text + more;
    const mark = element("span", `mark ${tone}`, element("span", "", glyph), text);
    mark.firstChild.setAttribute("aria-hidden", "true");
    badge.replaceChildren(mark);
    if (!more) return;
    const link = element("a", "", more);
    link.href = location.href;
    badge.prepend(link);
  }
  function element(name, className, ...inside) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...inside);
    return made;
  }
  function lose() {
    if (isLive) lostAt = Date.now();
    isLive = false;
  }

  // In lists, cells are replaced in place, and rows are never moved.
  const rows = new Map();
  if (list) for (const link of list.querySelectorAll("#result_list tbody a[href]")) {
    const key = new URL(link.href).pathname.match(/^(.*\/)([^/]+)\/change\/$/);
    if (key && key[1] === location.pathname)
      rows.set(key[2].replace(/_([0-9A-F]{2})/g, (_, code) => String.fromCharCode(parseInt(code, 16))), link.closest("tr"));
  }
  // Rows without a page of their own.
  for (const mark of list?.querySelectorAll("#result_list tbody [data-row]") ?? []) rows.set(mark.dataset.row, mark.closest("tr"));
  function patch(key, cells) {
    for (const [column, html] of Object.entries(cells)) {
      const cell = Array.from(rows.get(key)?.children ?? []).find(one => one.classList.contains(column));
      if (!cell) continue;
      const now = new DOMParser().parseFromString(html, "text/html").body;
      if (now.innerHTML === cell.innerHTML) continue;
      const focused = cell.contains(document.activeElement);
      cell.replaceChildren(...now.childNodes);
      if (focused) cell.querySelector("a")?.focus();
      cell.classList.remove("changed");
      void cell.offsetWidth;
      cell.classList.add("changed");
    }
  }
  function bury(key) {
    const row = rows.get(key);
    if (!row || row.classList.contains("gone")) return;
    row.classList.add("gone");
    const mark = element("span", "mark warn", element("span", "", "▲"), "gone");
    mark.firstChild.setAttribute("aria-hidden", "true");
    row.querySelector("[class*='field-']")?.prepend(mark, " ");
  }

  // Other pages are fetched again, and only the nodes that differ are changed, so that focus, selection, scroll position
  // and open parts stay. A form that somebody uses is not changed. The reason for not using a library is in ADR 1.
  function isFormInUse(form) {
    return form.matches(":hover") || form.contains(document.activeElement)
      || Array.from(form.querySelectorAll("input:not([type=hidden]), textarea")).some(one => one.value !== one.defaultValue);
  }
  function removeUnlessInUse(node) {
    const forms = node.nodeName === "FORM" ? [node] : Array.from(node.querySelectorAll?.("form") ?? []);
    if (forms.some(isFormInUse)) held = true;
    else node.remove();
  }
  // Return the key by which a moved element is recognised: of a section its heading, of a table row its first link.
  function keyOf(node) {
    if (node.nodeType !== Node.ELEMENT_NODE) return "";
    const link = node.nodeName === "TR" && node.querySelector("a[href]");
    return node.id || node.getAttribute("aria-labelledby") || (link ? link.getAttribute("href") : "");
  }
  function morph(old, now) {
    if (old.isEqualNode(now) || old.dataset?.drawn !== undefined) return;  // another script draws that
    if (old.nodeType !== Node.ELEMENT_NODE) return void (old.data = now.data);
    if (old.nodeName === "FORM" && isFormInUse(old)) return void (held = true);
    for (const { name } of Array.from(old.attributes))
      if (!now.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    for (const { name, value } of now.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const after = Array.from(now.childNodes), wanted = new Set(after.map(keyOf)), keyed = new Map();
    for (const one of Array.from(old.childNodes)) {
      if (keyOf(one) && !wanted.has(keyOf(one))) removeUnlessInUse(one);
      else if (!keyed.has(keyOf(one))) keyed.set(keyOf(one), one);
    }
    let spot = old.firstChild;
    for (const one of after) {
      const key = keyOf(one), like = spot && !keyOf(spot) && spot.nodeName === one.nodeName ? spot : null;
      const same = key ? keyed.get(key) : like;
      if (key) keyed.delete(key);  // several rows can have the same first link
      if (same && same === spot) spot = spot.nextSibling;
      else old.insertBefore(same ?? one, spot);
      if (same) morph(same, one);
    }
    while (spot) {
      const next = spot.nextSibling;
      removeUnlessInUse(spot);
      spot = next;
    }
  }
  async function read(address) {
    const answer = await fetch(address);
    if (answer.redirected || answer.status === 403) ended = ENDED[4401];
    if (answer.redirected || !answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const token = document.querySelector("[name=csrfmiddlewaretoken]")?.value;
    page.querySelectorAll("main [name=csrfmiddlewaretoken]").forEach(one => token && one.setAttribute("value", token));
    return page;
  }
  function again() {
    return fetching ??= renew().finally(() => { fetching = undefined; });
  }
  async function renew() {
    try {
      const page = await read(location.href), newer = document.adoptNode(page.querySelector("main"));
      newer.prepend(...Array.from(main.querySelectorAll(":scope > .message"), said => said.cloneNode(true)));
      held = false;
      const focused = document.activeElement;
      morph(main, newer);
      if (focused.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });  // it was moved
      const aside = document.querySelector(".bar > p:not(.live)"), then = page.querySelector(".bar > p");
      if (aside && then) morph(aside, then);
      return true;
    } catch (error) {
      return false;
    }
  }

  // A part that shows work in progress has an address of its own. It is fetched once a second, also without a socket.
  async function pieces() {
    for (const piece of document.hidden ? [] : main?.querySelectorAll("[data-live]") ?? []) try {
      if (!piece.dataset.live) continue;  // its work has ended: the page was read again for a piece before it
      const now = (await read(piece.dataset.live)).body.firstElementChild;
      if (now.dataset.open !== piece.dataset.open) await again();
      else if (!piece.contains(document.activeElement)) morph(piece, now);
    } catch (error) { /* the next round fetches it again */ }
    setTimeout(pieces, PIECE_MS);
  }

  function connect() {
    if (ended || socket) return;
    heard = Date.now();
    const own = socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws/console`);
    own.onopen = () => own.send(JSON.stringify(
      { path: list ? location.pathname : "", query: list ? location.search.slice(1) : "",
        page: list ? "" : location.pathname, rows: Array.from(rows.keys()).slice(0, 100) }));
    own.onmessage = async event => {
      const said = JSON.parse(event.data);
      heard = Date.now();
      for (const [key, cells] of Object.entries(said.rows ?? {})) patch(key, cells);
      (said.gone ?? []).forEach(bury);
      fresh = said.new ?? fresh;
      if (said.behind) behindSince = heard - said.behind * 1000;
      if (said.moved) {
        behindSince ||= heard;
        if (!await again()) return away(own);
        behindSince = 0;
      }
      if (own !== socket) return;
      if (said.live) [isLive, tries, lastLive] = [true, 0, heard];
      else lose();
      draw();
    };
    own.onclose = event => away(own, event.code);
  }
  function away(own, code) {
    if (own !== socket) return;
    socket = undefined;
    behindSince = 0;  // the badge says since when the page is stale
    own.close();
    lose();
    ended = ENDED[code] ?? ended;
    if (!document.hidden) setTimeout(connect, Math.min(LONGEST_MS, 500 * 2 ** tries++) * (0.5 + Math.random()));
    draw();
  }
  document.addEventListener("visibilitychange", () => {
    clearTimeout(asleep);
    if (document.hidden) asleep = setTimeout(() => socket && away(socket), HIDDEN_MS);
    else connect();
  });
  setInterval(() => {
    if (socket && Date.now() - heard > SILENCE_MS) away(socket);
    draw();
  }, 1000);

  // Update relative times such as `3 min ago`, in the server's words.
  function amount(seconds) {
    const unit = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size);
    return unit ? `${Math.floor(seconds / unit[0])} ${unit[1]}` : `${Math.floor(seconds)} s`;
  }
  setInterval(() => document.querySelectorAll("time[datetime][title]").forEach(time => {
    const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000, by = Math.abs(seconds);
    if (/^(now|in .*|.* ago)$/.test(time.textContent))
      time.textContent = by < 1 ? "now" : seconds > 0 ? `${amount(by)} ago` : `in ${amount(by)}`;
  }), TIMES_MS);

  pieces();
  connect();
  draw();
})();
