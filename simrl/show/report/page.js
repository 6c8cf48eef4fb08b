/* What the page does: draws the pictures one after the other, sorts tables, and draws timelines and sweeps anew as they are asked for.
   Invariant: numbers come from #data and are drawn, filtered, sorted; what is computed here is medians, and what fills a column of
   the timeline. Texts go into the page as text. */
"use strict";
(() => {
const $ = id => document.getElementById(id);
const touch = matchMedia("(pointer: coarse)").matches;
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
const WITH_BUTTONS = { displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
const INK = "#333333";
const escaped = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const element = (name, text = "", parent = null) => {
  const made = document.createElement(name);
  made.textContent = text;
  if (parent) parent.append(made);
  return made;
};

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function draw(place, figure, config = {}) {
  const layout = { ...figure.layout, dragmode: touch ? false : figure.layout.dragmode || "zoom", autosize: true };
  return Plotly.react(place, figure.data, layout, { ...CONFIG, ...config }).then(() => roomForNames(place, layout.height));
}

/* An SVG as an image: no markup in it can act, and on a narrow screen it is moved sideways in its box rather than shrunk. */
async function image(place, svg, words) {
  const box = element("div"), drawn = element("img", "", box);
  box.className = "wide"; box.tabIndex = 0;
  drawn.alt = words;
  drawn.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await drawn.decode();
  place.replaceChildren(box);
  place.style.minHeight = "";
}

/* Many names below each other, as a phone has them, would take the picture's own room: it gets taller instead. */
function roomForNames(place, height) {
  const least = 0.5 * height, left = place._fullLayout._size.h;
  return left < least && Plotly.relayout(place, { height: height + least - left });
}

/* Pictures are drawn as they come near the screen, and all before they are printed. */

const waiting = new Map(), busy = new Set();
const near = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(entry => drawNow(entry.target)), { rootMargin: "300px 0px" });

function drawNow(place) {
  const drawing = waiting.get(place);
  if (!drawing) return;
  waiting.delete(place);
  near.unobserve(place);
  const done = Promise.resolve(drawing()).finally(() => busy.delete(done));
  busy.add(done);
}

/* At once where it was drawn before, else when it is seen. */
function show(place, height, drawing) {
  if (place.classList.contains("js-plotly-plot")) return drawing();
  place.style.minHeight = `${height}px`;
  waiting.set(place, drawing);
  near.observe(place);
}

/* Tables: sorted by the number of a cell where it has one, else by its text; in a column of numbers, cells without one stay last. */

function sortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
    const falling = heading.getAttribute("aria-sort") !== "descending";
    headings.forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const body = table.tBodies[0];
    const key = row => {
      const cell = row.cells[column];
      if ("value" in cell.dataset) return Number(cell.dataset.value);
      return heading.classList.contains("text") ? cell.textContent : null;
    };
    const rows = [...body.rows].map(row => [key(row), row]);
    rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : compared(a, b) * (falling ? -1 : 1));
    body.append(...rows.map(pair => pair[1]));
  }));
}

const compared = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });

/* A timeline is drawn as a grid of columns and lanes, anew for every stretch of time, so that it is as exact as the screen. */

const CELLS = 240000, TRAINER = 2.5, ROOM = 40;
let shown = null;  // run, lanes chosen, from and to in seconds

function spansOf(lane, unit) {
  const n = lane.ends.length, ends = new Float64Array(n), versions = new Int32Array(n);
  let end = 0, version = 0;
  for (let i = 0; i < n; i++) {
    ends[i] = (end += lane.ends[i]) * unit;
    versions[i] = version += lane.versions[i];
  }
  return { ends, versions, joined: new Map(lane.joined) };
}

function firstEndingAfter(ends, at) {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > at) high = middle; else low = middle + 1;
  }
  return low;
}

function filled(lane, kinds, from, to, columns) {
  const row = new Float32Array(columns).fill(NaN), most = new Float64Array(columns), width = (to - from) / columns;
  const ends = lane.spans.ends;
  let i = firstEndingAfter(ends, from), start = Math.max(i ? ends[i - 1] : 0, from);
  const seconds = new Float64Array(kinds);
  let column = 0, touched = [];
  const close = () => {
    let best = -1;
    for (const kind of touched) {
      if (best < 0 || seconds[kind] > seconds[best]) best = kind;
    }
    if (best >= 0) row[column] = best;
    for (const kind of touched) seconds[kind] = 0;
    touched = [];
  };
  while (i < ends.length && start < to && column < columns) {
    const kind = parseInt(lane.kinds[i], 36), edge = from + (column + 1) * width, end = Math.min(ends[i], to);
    const part = Math.min(end, edge) - start;
    if (part > 0) {
      if (!seconds[kind]) touched.push(kind);
      seconds[kind] += part;
      start += part;
    }
    if (start >= edge - 1e-12) { close(); column++; }
    if (start >= ends[i] - 1e-12) i++;
    else if (part <= 0) { start = edge; close(); column++; }
  }
  if (column < columns) close();
  return row;
}

function chosenLanes(run, text) {
  const workers = run.lanes.filter(lane => lane.rollout), trainers = run.lanes.filter(lane => !lane.rollout);
  if (!text.trim() || text.trim().toLowerCase() === "all") return [...workers, ...trainers];
  const wanted = new Set();
  for (const part of text.split(",")) {
    const found = part.trim().match(/^(\d+)(?:\s*-\s*(\d+))?$/);
    if (!found) return null;
    for (let i = +found[1]; i <= Math.min(+(found[2] || found[1]), workers.length); i++) wanted.add(i);
  }
  const lanes = workers.filter((_, i) => wanted.has(i));
  return lanes.length ? [...lanes, ...trainers] : null;
}

function drawTimeline() {
  show($("timeline"), 320, drawLanes);
}

function drawLanes() {
  const { run, lanes, from, to } = shown, place = $("timeline");
  const edges = [0];
  for (const lane of lanes) edges.push(edges[edges.length - 1] + (lane.rollout ? 1 : TRAINER * Math.max(1, lanes.length / ROOM)));
  const columns = Math.max(50, Math.min(Math.floor(place.clientWidth) - 60, Math.floor(CELLS / lanes.length), 2000));
  const z = lanes.map(lane => filled(lane, run.kinds.length, from, to, columns));
  const steps = run.kinds.length, seen = run.colors.map((color, i) => run.hatched[i] ? "rgba(255,255,255,0)" : color);
  const scale = seen.flatMap((color, i) => [[i / steps, color], [(i + 1) / steps, color]]);
  const x = Float64Array.from({ length: columns + 1 }, (_, i) => from + (to - from) * i / columns);
  const updates = run.updates_s.map((at, i) => [at, run.steps[i]]).filter(([at]) => at >= from && at <= to);
  const every = Math.ceil(updates.length / 12);
  const middles = lanes.map((_, i) => (edges[i] + edges[i + 1]) / 2);
  const thick = edges[edges.length - 1], room = Math.min(560, Math.max(90, 15 * thick)), requests = 80, around = 112;
  const labels = labelled(lanes, room / thick);
  const top = requests / (requests + room);
  const figure = {
    data: [
      { type: "heatmap", x, y: edges, z, zmin: -0.5, zmax: steps - 0.5, colorscale: scale, showscale: false, zsmooth: false, hoverinfo: "none" },
      { type: "scatter", mode: "lines", line: { shape: "hv", color: INK, width: 1.2 }, fill: "tozeroy", fillcolor: "rgba(153,153,153,.3)",
        x: run.requests.times, y: run.requests.counts, yaxis: "y2", hovertemplate: "%{y:,} requests at %{x:,.1f} s<extra></extra>" },
    ],
    layout: {
      height: Math.round(room + requests + around),
      margin: { l: 8, r: 12, t: 42, b: 8 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", showlegend: false, dragmode: touch ? "pan" : "zoom",
      font: { family: "system-ui, sans-serif", size: 13, color: INK },
      xaxis: { range: [from, to], title: { text: "seconds since the start of the run", standoff: 8 }, automargin: true, anchor: "y2", showgrid: false, zeroline: false, tickformat: ",", minallowed: 0, maxallowed: run.end_s },
      yaxis: { domain: [top + 0.02, 1], range: [thick, 0], fixedrange: true, automargin: true, showgrid: false, zeroline: false,
        tickvals: labels.map(i => middles[i]), ticktext: labels.map(i => escaped(lanes[i].rollout ? lanes[i].number : lanes[i].name)), title: { text: "worker", standoff: 6 } },
      yaxis2: { domain: [0, top], fixedrange: true, automargin: true, rangemode: "tozero", nticks: 3, gridcolor: "#E6E6E6", title: { text: "requests", standoff: 6 } },
      shapes: updates.length > 80 ? [] : updates.map(([at]) => ({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: INK, width: 1 } })),
      images: [{ source: hatch(run, place.clientWidth, room), xref: "paper", yref: "paper", x: 0, y: 1, sizex: 1, sizey: 0.98 - top, sizing: "stretch", layer: "below" }],
      annotations: updates.filter((_, i) => i % every === 0).map(([at, step]) => ({ x: at, y: 1, yref: "paper", yanchor: "bottom", text: `${step}`, showarrow: false, font: { size: 11 } })),
    },
  };
  const first = !place.classList.contains("js-plotly-plot");
  shown.lanesDrawn = lanes; shown.edges = edges;
  const done = Plotly.react(place, figure.data, figure.layout, { ...CONFIG, ...WITH_BUTTONS, doubleClick: false, modeBarButtons: [["toImage"]] });
  if (first) timelineEvents();
  return done;
}

/* Where a kind is hatched the grid lets this ground be seen: stripes for an area of the screen. */
function hatch(run, width, height) {
  const canvas = element("canvas"), sharp = devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(height * sharp);
  pen.scale(sharp, sharp);
  pen.strokeStyle = run.colors[run.hatched.indexOf(true)] || INK;
  pen.lineWidth = 1.6;
  for (let x = -height; x < width; x += 7) { pen.moveTo(x, height); pen.lineTo(x + height, 0); }
  pen.stroke();
  return canvas.toDataURL();
}

function labelled(lanes, height) {
  const workers = lanes.map((lane, i) => i).filter(i => lanes[i].rollout), every = Math.ceil(14 / height);
  return [...workers.filter((_, i) => i % every === 0), ...lanes.map((_, i) => i).filter(i => !lanes[i].rollout)];
}

function look(from, to) {
  const width = Math.max(Math.min(to - from, shown.run.end_s), shown.run.end_s * 1e-5);
  shown.from = Math.max(0, Math.min(from, shown.run.end_s - width));
  shown.to = shown.from + width;
  drawTimeline();
}

function sayLanes() {
  const { run, lanes } = shown, workers = lanes.filter(lane => lane.rollout).length, all = run.lanes.filter(lane => lane.rollout).length;
  const coarse = run.joined ? ` To keep the file small, ${run.joined.toLocaleString("en")} things shorter than ${run.shortest_s.toPrecision(2)} s are joined with their neighbours.` : "";
  $("lanes-said").textContent = `${workers === all ? "All" : workers + " of"} ${all} rollout worker${all > 1 ? "s" : ""}.${coarse}`;
}

function legend(run) {
  $("kinds").replaceChildren(element("li", "Of the whole run:"), ...run.kinds.map((kind, i) => [kind, i]).sort((a, b) => (a[0] === "idle") - (b[0] === "idle")).map(([kind, i]) => {
    const item = element("li"), shares = Object.entries(run.shares[kind] || {}).map(([who, share]) => `${who} ${(100 * share).toFixed(1)}%`);
    const color = run.colors[i], mark = element("i", "", item);
    mark.style.background = run.hatched[i] ? `repeating-linear-gradient(135deg, ${color} 0 1.5px, #fff 1.5px 4px)` : color;
    item.append(`${run.words[i]}${shares.length ? ": " + shares.join(", ") : ""}`);
    return item;
  }));
}

function timelineEvents() {
  const place = $("timeline"), tip = element("div", "", document.body);
  tip.className = "tip"; tip.hidden = true; tip.id = "tip"; tip.setAttribute("role", "tooltip");
  place.on("plotly_relayout", change => {
    if ("xaxis.range[0]" in change) look(change["xaxis.range[0]"], change["xaxis.range[1]"]);
    else if (change["xaxis.range"]) look(...change["xaxis.range"]);
  });
  place.on("plotly_doubleclick", () => look(0, shown.run.end_s));
  place.on("plotly_hover", event => {
    const point = event.points.find(p => p.curveNumber === 0);
    if (!point) { tip.hidden = true; return; }
    const { run, lanesDrawn: lanes, edges } = shown;
    let lane = 0;
    while (lane < lanes.length - 1 && edges[lane + 1] <= point.y) lane++;
    const { spans, kinds, tokens, name } = lanes[lane], i = Math.min(firstEndingAfter(spans.ends, point.x), spans.ends.length - 1);
    const start = i ? spans.ends[i - 1] : 0, kind = run.words[parseInt(kinds[i], 36)], joined = spans.joined.get(i);
    const seconds = spans.ends[i] - start;
    tip.textContent = [
      `${name}: ${kind}${joined ? `, most of ${joined} things that are joined` : ""}`,
      `${seconds.toLocaleString("en", { maximumSignificantDigits: 4 })} s, from ${start.toLocaleString("en", { maximumFractionDigits: 2 })} s on`,
      ...(spans.versions[i] >= 0 ? [`policy version ${spans.versions[i]}`] : []),
      ...(tokens[i] ? [`${tokens[i].toLocaleString("en")} tokens`] : []),
    ].join("\n");
    tip.hidden = false;
    const { clientX, clientY } = event.event, box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, clientY + 18 + box.height > innerHeight ? clientY - box.height - 10 : clientY + 18)}px`;
  });
  place.on("plotly_unhover", () => { tip.hidden = true; });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
}

function showRun(data, index) {
  const { name, timeline: run, figures } = data.runs[index];
  for (const lane of run.lanes) lane.spans ||= spansOf(lane, run.unit_s);
  run.lanes.filter(lane => lane.rollout).forEach((lane, i) => { lane.number = i; });
  $("chosen").textContent = name;
  document.querySelectorAll("[data-run]").forEach(part => { part.hidden = part.dataset.run !== String(index); });
  shown = { run, lanes: chosenLanes(run, $("workers").value) || chosenLanes(run, "all") };
  legend(run);
  sayLanes();
  look(...run.window_s);
  const grid = $("figures");
  grid.querySelectorAll(".picture").forEach(place => { waiting.delete(place); near.unobserve(place); });
  grid.replaceChildren();
  for (const [title, figure] of Object.entries(figures)) {
    const box = element("figure", "", grid), place = (element("h3", title, box), element("div", "", box));
    place.className = "picture";
    show(place, 250, () => image(place, figure, `${title} of ${name}`));
  }
}

function runs(data) {
  sortable($("summary"));
  for (const [name, figure] of Object.entries(data.figures)) show($(name), 250, () => image($(name), figure, $(name).dataset.words));
  showRun(data, +$("run").value);
  $("run").addEventListener("change", () => showRun(data, +$("run").value));
  $("workers").addEventListener("input", () => {
    const lanes = chosenLanes(shown.run, $("workers").value);
    $("workers").setAttribute("aria-invalid", String(!lanes));
    if (lanes) { shown.lanes = lanes; sayLanes(); drawTimeline(); }
  });
  const by = (id, range) => $(id).addEventListener("click", () => look(...range(shown.from, shown.to, shown.to - shown.from)));
  by("middle", () => shown.run.window_s);
  by("whole", () => [0, shown.run.end_s]);
  by("earlier", (from, to, width) => [from - width / 2, to - width / 2]);
  by("later", (from, to, width) => [from + width / 2, to + width / 2]);
  by("closer", (from, to, width) => [from + width / 4, to - width / 4]);
  by("further", (from, to, width) => [from - width / 2, to + width / 2]);
}

const frame = () => new Promise(done => requestAnimationFrame(done));

/* A sweep: columns of the points that were simulated. */

const FORMATS = {
  g3: v => v === 0 ? "0" : v < 1000 ? v.toPrecision(3) : v.toLocaleString("en", { maximumFractionDigits: 0 }),
  n0: v => v.toLocaleString("en"),
  x2: v => `${v.toFixed(2)}×`, p0: v => `${Math.round(100 * v)}%`, f2: v => v.toFixed(2),
};
const PAGE = 100;

function sweep(data) {
  const { keys, metrics, columns, series: COLORS } = data, count = columns.point.length;
  const metric = Object.fromEntries(metrics.map(m => [m.key, m]));
  const text = (key, i) => {
    const value = columns[key][i];
    if (value === null) return "–";
    return metric[key] ? FORMATS[metric[key].format](value) : String(value);
  };
  const setting = i => keys.filter(key => columns[key][i] !== null).map(key => key === "system.name" ? columns[key][i] : `${key}=${columns[key][i]}`);
  const words = Array.from({ length: count }, (_, i) => `${columns.point[i]} ${setting(i).join(" ")}`.toLowerCase());
  const system = keys.includes("system.name") ? "system.name" : keys[0];
  const distinct = key => [...new Set(columns[key].filter(value => value !== null))].sort(compared);
  const name = key => metric[key] ? metric[key].name : key;
  const titled = key => escaped(name(key) + (metric[key]?.unit ? ` [${metric[key].unit}]` : ""));
  let kept = Array.from({ length: count }, (_, i) => i), order = null, limit = PAGE;

  const options = (id, values, chosen) => {
    for (const key of values) element("option", name(key), $(id)).value = key;
    $(id).value = chosen;
    $(id).addEventListener("change", scatter);
  };

  function hover(i) {
    const said = [`<b>point ${columns.point[i]}</b>`, ...setting(i).map(escaped)];
    for (const m of metrics.slice(0, 9)) if (columns[m.key][i] !== null) said.push(`${escaped(m.name)} ${text(m.key, i)}`);
    if (!columns.settled[i]) said.push("off-policyness had not settled");
    return said.join("<br>");
  }

  const scatter = () => show($("scatter"), 440, drawScatter);

  function drawScatter() {
    const [x, y, colour] = ["across", "up", "colour"].map(id => $(id).value);
    const groups = new Map(distinct(colour).map(value => [value, []]));
    groups.set(null, []);
    for (const i of kept) groups.get(columns[colour][i]).push(i);
    const spread = groups.size > COLORS.length && typeof distinct(colour)[0] === "number";
    const marks = places => ({ type: "scatter", mode: "markers", cliponaxis: false, x: places.map(i => columns[x][i]), y: places.map(i => columns[y][i]), hovertext: places.map(hover), hovertemplate: "%{hovertext}<extra></extra>" });
    const traces = spread
      ? [{ ...marks(kept), marker: { size: 7, opacity: 0.75, color: kept.map(i => columns[colour][i]), colorscale: "Viridis", colorbar: { title: { text: escaped(name(colour)) } } } }]
      : [...groups].filter(([, places]) => places.length).map(([value, places], i) => ({ ...marks(places), name: escaped(value ?? "–"), marker: { size: 7, opacity: 0.75, color: COLORS[i % COLORS.length] } }));
    const axis = key => ({ title: { text: titled(key), standoff: 8 }, automargin: true, gridcolor: "#E6E6E6", zerolinecolor: "#999", rangemode: "tozero", ...(metric[key] && metric[key].format === "p0" ? { tickformat: ".0%" } : {}) });
    return draw($("scatter"), { data: traces, layout: layout(440, { xaxis: axis(x), yaxis: axis(y), hovermode: "closest", showlegend: !spread }) }, WITH_BUTTONS);
  }

  const layout = (height, more) => ({
    height, margin: { l: 8, r: 12, t: 8, b: 8 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: { family: "system-ui, sans-serif", size: 13, color: INK },
    hoverlabel: { align: "left" }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", maxheight: 2000 }, ...more,
  });

  function effects() {
    const grid = $("effects");
    for (const key of keys.filter(key => distinct(key).length > 1)) {
      let place = grid.querySelector(`[data-key="${CSS.escape(key)}"]`);
      if (!place) {
        place = element("div", "", grid);
        place.className = "picture"; place.dataset.key = key; place.setAttribute("role", "img"); place.setAttribute("aria-label", `samples/s for each value of ${key}`);
      }
      show(place, 300, () => drawEffect(place, key));
    }
  }

  function drawEffect(place, key) {
    const values = distinct(key), numbers = values.every(value => typeof value === "number");
    const systems = key === system ? [null] : distinct(system), many = numbers && values.length > 12;
    const data = systems.map((value, s) => {
      const places = kept.filter(i => columns[key][i] !== null && (value === null || columns[system][i] === value));
      const x = places.map(i => many ? columns[key][i] : escaped(columns[key][i])), y = places.map(i => columns.samples_per_s[i]);
      const colour = COLORS[s % COLORS.length], named = { name: escaped(value ?? "samples/s"), x, y };
      return many
        ? { ...named, type: "scatter", mode: "markers", marker: { size: 5, opacity: 0.6, color: colour }, hovertext: places.map(hover), hovertemplate: "%{hovertext}<extra></extra>" }
        : { ...named, type: "box", boxpoints: false, marker: { color: colour }, line: { width: 1.2 } };
    }).filter(trace => trace.x.length);
    const xaxis = { title: { text: escaped(key), standoff: 8 }, automargin: true, ...(many ? {} : { type: "category", categoryorder: "array", categoryarray: values.map(escaped) }) };
    return draw(place, { data, layout: layout(300, { boxmode: "group", xaxis, yaxis: { title: { text: "samples/s", standoff: 8 }, automargin: true, rangemode: "tozero", gridcolor: "#E6E6E6" }, showlegend: systems.length > 1 }) });
  }

  const shownColumns = ["point", ...keys, ...metrics.map(m => m.key)];
  const headings = element("tr", "", $("points").tHead);
  for (const key of shownColumns) {
    const heading = element("th", "", headings), button = element("button", name(key), heading);
    heading.scope = "col"; button.type = "button"; heading.title = metric[key] ? metric[key].meaning : key === "point" ? "its number in the sweep's table" : "varied";
    button.addEventListener("click", () => {
      const falling = heading.getAttribute("aria-sort") !== "descending";
      sortBy(key, falling);
    });
  }

  function sortBy(key, falling) {
    [...headings.cells].forEach(cell => cell.removeAttribute("aria-sort"));
    headings.cells[shownColumns.indexOf(key)].setAttribute("aria-sort", falling ? "descending" : "ascending");
    order = { key, falling };
    table();
  }

  function table() {
    const values = columns[order.key], sign = order.falling ? -1 : 1;
    const sorted = [...kept].sort((a, b) => (values[a] === null) - (values[b] === null) || sign * compared(values[a], values[b]) || a - b);
    const visible = sorted.slice(0, limit);
    $("points").tBodies[0].replaceChildren(...visible.map(i => {
      const row = element("tr");
      for (const key of shownColumns) element("td", text(key, i), row).className = typeof columns[key][i] === "string" ? "text" : "";
      return row;
    }));
    $("shown").textContent = `${visible.length.toLocaleString("en")} of ${kept.length.toLocaleString("en")} points are listed${kept.length < count ? `, of ${count.toLocaleString("en")} simulated` : ""}.`;
    $("more").disabled = $("all").disabled = visible.length === kept.length;
  }

  function filter() {
    const wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    kept = words.map((_, i) => i).filter(i => wanted.every(word => words[i].includes(word)));
    $("filtered").textContent = wanted.length ? `${kept.length.toLocaleString("en")} points.` : "";
    limit = PAGE;
    table();
    scatter();
    effects();
  }

  const axes = [...metrics.map(m => m.key), ...keys.filter(key => typeof distinct(key)[0] === "number")];
  const across = axes.includes("off_policyness_mean") && distinct("off_policyness_mean").length > 1 ? "off_policyness_mean" : "gpu_hours_per_1k_samples";
  options("across", axes, across);
  options("up", axes, "samples_per_s");
  options("colour", keys, system);
  $("more").addEventListener("click", () => { limit += PAGE; table(); });
  $("all").addEventListener("click", () => { limit = Infinity; table(); });
  let typed = 0;
  $("filter").addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(filter, 200); });
  sortBy("samples_per_s", true);
  if (!count) return;
  scatter();
  effects();
}

/* Pictures have the paper's width while they are printed. */

const PAPER = 690;
addEventListener("beforeprint", () => {
  [...waiting.keys()].forEach(drawNow);
  document.querySelectorAll(".js-plotly-plot").forEach(place => Plotly.relayout(place, { width: PAPER, autosize: false }));
});
addEventListener("afterprint", () => document.querySelectorAll(".js-plotly-plot").forEach(place => Plotly.relayout(place, { width: null, autosize: true })));

(async () => {
  try {
    const data = await unpacked($("data").textContent);
    (data.runs ? runs : sweep)(data);
    await frame();
    await frame();
    while (busy.size) await Promise.all(busy);
  } catch (error) {
    $("trouble").textContent = `The pictures cannot be drawn (${error.message}). A current browser may help.`;
    $("trouble").hidden = false;
    console.error(error);
  }
  document.documentElement.dataset.drawn = "yes";
  performance.mark("drawn");
})();
})();
