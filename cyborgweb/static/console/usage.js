// Draw the charts of a device's load: the samples of its agent, once a second, over the last five minutes; one line for
// each number. Without an event stream (a REST process serves this page) the load is fetched every two seconds. Without
// this file the page shows numbers only. The lines are SVG paths, because CSS gives those the theme's colours. The
// reason for not using a library is in ADR 1.
(function () {
  const KEPT_MS = 300000, GAP_MS = 15000, POLL_MS = 2000, AGAIN_MS = 30000, CALM_MS = 5000, OLD_S = 90;
  const WIDE = 300, HIGH = 56, SVG = "http://www.w3.org/2000/svg";
  const UNITS = { percent: " %", celsius: " °C", watts: " W" };
  const place = document.querySelector("[data-usage]");
  const charts = place?.querySelector(".charts"), state = place?.querySelector("[data-state]");
  if (!charts || !state) return;
  const FIRST = ["utilization_percent", "memory_used_bytes", "temperature_celsius", "power_watts"];
  const calm = matchMedia("(prefers-reduced-motion: reduce)"), lines = new Map();
  let source, timer, drawnAt = 0, lastAt = null, sizes = {};

  function say(tone, glyph, text) {
    if (state.textContent === glyph + text) return;
    const mark = document.createElement("span"), sign = document.createElement("span");
    mark.className = `mark ${tone}`;
    sign.textContent = glyph;
    sign.setAttribute("aria-hidden", "true");
    mark.append(sign, text);
    state.replaceChildren(mark);
  }

  // Format names and numbers as the server does (cyborgweb.pages.load).
  function parts(metric) {
    const [, name, unit, which] = metric.match(/^(.*?)_(percent|bytes|celsius|watts|total)(?:_(\d+))?$/) ?? [, metric, "", ""];
    return { name: [name.replaceAll("_", " "), which].filter(Boolean).join(" "), unit };
  }
  function shown(unit, value) {
    if (unit !== "bytes") return (unit === "total" ? Math.round(value) : Number(value.toPrecision(4))).toLocaleString("en") + (UNITS[unit] ?? "");
    const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
    const number = value / 1024 ** power;
    return `${number.toFixed(power && number < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }

  // Sort the most important metrics first, and counters (such as errors) last.
  function order(one, other) {
    const rank = line => FIRST.includes(line.metric) ? FIRST.indexOf(line.metric) : line.unit === "total" ? 99 : FIRST.length;
    return rank(one) - rank(other) || (one.metric < other.metric ? -1 : 1);
  }
  function lineOf(metric) {
    if (lines.has(metric)) return lines.get(metric);
    const { name, unit } = parts(metric), figure = document.createElement("figure");
    const caption = document.createElement("figcaption"), label = document.createElement("span"), now = document.createElement("strong");
    const svg = document.createElementNS(SVG, "svg"), under = document.createElementNS(SVG, "path"), path = document.createElementNS(SVG, "path");
    const range = document.createElement("p");
    label.textContent = name;
    now.className = "now";
    range.className = "range";
    under.setAttribute("class", "under");
    svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.append(under, path);
    caption.append(label, now);
    figure.append(caption, svg, range);
    if (!lines.size) charts.replaceChildren();
    const line = { metric, name, unit, figure, svg, under, path, now, range, points: [] };
    lines.set(metric, line);
    charts.append(...Array.from(lines.values()).sort(order).map(one => one.figure));
    return line;
  }

  function bounds(line, low, high) {
    if (line.unit === "percent") return [0, 100];
    if (line.metric === "memory_used_bytes" && sizes.memory) return [0, sizes.memory];
    if (line.unit === "celsius" || line.unit === "total") return [low - 1, high + 1];
    return [Math.min(0, low), high > 0 ? high * 1.1 : 1];
  }
  function draw(line, at) {
    while (line.points.length && at - line.points[0].t > KEPT_MS) line.points.shift();
    const values = line.points.map(point => point.v);
    if (!values.length) return;
    const low = Math.min(...values), high = Math.max(...values), [floor, top] = bounds(line, low, high);
    const x = t => (WIDE * (1 - (at - t) / KEPT_MS)).toFixed(1), y = v => (HIGH - 2 - (HIGH - 4) * (v - floor) / (top - floor)).toFixed(1);
    const runs = [];
    line.points.forEach((point, n) => {
      if (!n || point.t - line.points[n - 1].t > GAP_MS) runs.push([]);
      runs.at(-1).push(point);
    });
    const traced = runs.map(run => run.map(({ t, v }) => `${x(t)} ${y(v)}`).join("L"));
    line.path.setAttribute("d", traced.map(run => `M${run}h.5`).join(""));
    line.under.setAttribute("d", runs.map((run, n) => `M${x(run[0].t)} ${HIGH}L${traced[n]}L${x(run.at(-1).t)} ${HIGH}Z`).join(""));
    const span = low === high ? "steady" : `${shown(line.unit, low)} to ${shown(line.unit, high)}`;
    const minutes = Math.max(1, Math.round((at - line.points[0].t) / 60000));
    const of = line.metric === "memory_used_bytes" && sizes.memory ? ` of ${shown("bytes", sizes.memory)}` : "";
    line.now.textContent = shown(line.unit, values.at(-1)) + of;
    line.range.textContent = `${span}, last ${minutes} min`;
    line.svg.setAttribute("aria-label", `${line.name}: now ${line.now.textContent}, ${line.range.textContent}`);
  }

  function take(said) {
    if (said.at === null) return say("calm", "○", said.silent.length ? `no samples: ${said.silent.join(", ")} may have them, and does not answer` : place.dataset.none);
    if (said.age_s > OLD_S) say("warn", "▲", "not heard for a while: the agent is down, or away");
    else say("good", "●", source ? "live, each second" : "asked every two seconds");
    const at = Date.now();
    if (said.at !== lastAt) {
      lastAt = said.at;
      sizes = { memory: said.values.memory_total_bytes };
      for (const [metric, v] of Object.entries(said.values))
        if (metric !== "memory_total_bytes" || !("memory_used_bytes" in said.values)) lineOf(metric).points.push({ t: at - said.age_s * 1000, v });
    }
    if (at - drawnAt < (calm.matches ? CALM_MS : 0)) return;
    drawnAt = at;
    lines.forEach(line => draw(line, at));
  }

  async function poll(since) {
    try {
      const answer = await fetch(place.dataset.usage, { headers: { Accept: "application/json" } });
      if ([401, 403, 404].includes(answer.status)) return say("warn", "▲", answer.status === 404 ? "this device is gone" : "you may not see it, or are signed out");
      if (!answer.ok) throw new Error(answer.statusText);
      take(await answer.json());
    } catch (error) {
      say("busy", "◐", "reconnecting");
    }
    timer = setTimeout(Date.now() - since > AGAIN_MS ? listen : poll, POLL_MS, since);
  }
  function listen() {
    const own = source = new EventSource(place.dataset.usage);
    own.onmessage = event => take(JSON.parse(event.data));
    own.onerror = () => {
      if (own !== source) return;
      say("busy", "◐", "reconnecting");
      if (own.readyState !== EventSource.CLOSED) return;
      source = undefined;
      poll(Date.now());
    };
  }
  function leave() {
    clearTimeout(timer);
    source?.close();
    source = undefined;
  }
  document.addEventListener("visibilitychange", () => {
    leave();
    if (!document.hidden) listen();
  });
  listen();
})();
