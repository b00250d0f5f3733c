"use strict";
// Draws what `forge report` found. All data lie in the page.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const many = data.runs.length > 1;
const plots = [];
let over = "step", view = null;

window.addEventListener("error", (event) => { root.dataset.error = event.message; });

const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const dashes = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 6]];
const color = (number) => css(`--c${number % 10}`);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function table(head, rows, where) {
  const made = element("table", undefined, "facts"), wide = element("div", undefined, "wide");
  const line = (cells, tag) => {
    const row = element("tr");
    for (const cell of cells) {
      const box = element(tag);
      if (cell instanceof Node) box.append(cell);
      else {
        box.textContent = cell ?? "";
        if (typeof cell === "number") box.textContent = number(cell);
        else if (String(cell ?? "").length > 44) box.className = "long";
      }
      row.append(box);
    }
    made.append(row);
  };
  if (head) line(head, "th");
  for (const row of rows) line(row, "td");
  wide.append(made);
  where.append(wide);
}

// numbers --------------------------------------------------------------------
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e15 || size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(5)));
}

// labels of an axis: as many digits as tell two neighbours apart
function brief(values, step) {
  const largest = Math.max(...values.map((value) => Math.abs(value ?? 0)));
  const digits = Math.min(12, Math.max(2, Math.ceil(Math.log10(largest / (step || 1)) + 1)) || 4);
  return values.map((value) => {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= scale) return String(Number((value / scale).toPrecision(digits))) + unit;
    }
    return size !== 0 && size < 1e-3 ? value.toExponential(Math.min(2, digits - 2)) : String(Number(value.toPrecision(digits)));
  });
}

// steps to tokens or hours, by straight lines between known points
function place(run, step) {
  const axes = data.runs[run].axes;
  if (over === "step" || !axes[over]) return step;
  const steps = axes.step, there = axes[over];
  let low = 0, high = steps.length - 1;
  if (high < 1) return there[0] ?? step;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return there[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (there[high] - there[low]);
}

// curves ---------------------------------------------------------------------
function labels(chart) {
  const names = chart.curves.map((one) => one.name);
  const alone = new Set(names).size === 1;
  if (alone) return chart.curves.map((one) => (many ? data.runs[one.run].name : one.name));
  let shared = names[0].lastIndexOf("/") + 1;
  while (shared > 0 && !names.every((name) => name.startsWith(names[0].slice(0, shared)))) {
    shared = names[0].lastIndexOf("/", shared - 2) + 1;
  }
  let tail = 0;
  const last = (name) => name.slice(name.lastIndexOf("/"));
  if (names.every((name) => name.includes("/") && last(name) === last(names[0]))) tail = last(names[0]).length;
  return chart.curves.map((one) => {
    const short = one.name.slice(shared, one.name.length - tail) || one.name;
    const run = data.runs[one.run].name;
    return many ? `${run} · ${short}` : short;
  });
}

function columns(chart) {
  const tables = chart.curves.map((one) => {
    const xs = [], ys = [];
    for (let at = 0; at < one.x.length; at++) {
      const x = place(one.run, one.x[at]);
      if (xs.length && x <= xs[xs.length - 1]) continue;
      xs.push(x);
      ys.push(one.y[at]);
    }
    return [xs, ys];
  });
  return uPlot.join(tables, tables.map(() => [0, 1]));
}

// the point of a curve that is nearest to the pointer: curves have points at different steps
function nearest(plot, series, at) {
  const ys = plot.data[series];
  if (series === 0 || ys[at] !== undefined) return at;
  for (let away = 1; away < 4000; away++) {
    if (ys[at - away] !== undefined && at - away >= 0) return at - away;
    if (ys[at + away] !== undefined) return at + away;
  }
  return at;
}

function drawMarks(plot) {
  if (!document.getElementById("marks").checked) return;
  const context = plot.ctx, box = plot.bbox;
  context.save();
  context.lineWidth = devicePixelRatio;
  data.runs.forEach((run, index) => {
    for (const [step, kind] of run.marks) {
      const x = Math.round(plot.valToPos(place(index, step), "x", true));
      if (x < box.left || x > box.left + box.width) continue;
      context.strokeStyle = many ? color(index) : css(kind === "start" ? "--start" : kind === "change" ? "--change" : "--bad");
      context.setLineDash(kind === "start" ? [4, 4] : kind === "change" ? [2, 6] : []);
      context.beginPath();
      context.moveTo(x, box.top);
      context.lineTo(x, box.top + box.height);
      context.stroke();
    }
  });
  context.restore();
}

// from the first to the last point of any curve
function everything() {
  let min = Infinity, max = -Infinity;
  for (const chart of data.charts) {
    for (const one of chart.curves) {
      min = Math.min(min, place(one.run, one.x[0]));
      max = Math.max(max, place(one.run, one.x[one.x.length - 1]));
    }
  }
  return max > min ? { min, max } : { min: (min || 0) - 1, max: (max || 0) + 1 };
}

// all charts show the same part of the runs; null is all of it
function zoom(range) {
  view = range;
  for (const plot of plots) plot.setScale("x", view ?? everything());
}

function selected(plot) {
  const { left, width } = plot.select;
  if (width < 4) return;
  const range = { min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") };
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  zoom(range);
}

function touches(plot) {
  const over = plot.over;
  let pinch = null, tapped = 0;
  over.style.touchAction = "pan-y";
  const points = (event) => [...event.touches].map((one) => one.clientX - over.getBoundingClientRect().left);
  const show = (event) => {
    const left = points(event)[0];
    plot.setCursor({ left, top: event.touches[0].clientY - over.getBoundingClientRect().top });
  };
  over.addEventListener("touchstart", (event) => {
    if (event.touches.length === 2) {
      const [a, b] = points(event), { min, max } = plot.scales.x;
      pinch = { wide: Math.max(8, Math.abs(a - b)), middle: plot.posToVal((a + b) / 2, "x"), min, max };
      event.preventDefault();
    } else show(event);
  }, { passive: false });
  over.addEventListener("touchmove", (event) => {
    if (pinch && event.touches.length === 2) {
      const [a, b] = points(event), by = pinch.wide / Math.max(8, Math.abs(a - b));
      zoom({ min: pinch.middle - (pinch.middle - pinch.min) * by, max: pinch.middle + (pinch.max - pinch.middle) * by });
      event.preventDefault();
    } else if (!pinch) show(event);
  }, { passive: false });
  over.addEventListener("touchend", (event) => {
    if (event.touches.length) return;
    if (!pinch && event.timeStamp - tapped < 300) zoom(null);
    tapped = event.timeStamp;
    pinch = null;
  });
}

function draw(chart, where) {
  const card = element("div", undefined, "chart"), top = element("div", undefined, "top");
  const positive = chart.curves.every((one) => one.y.every((y) => y === null || y > 0));
  const toggle = element("button", "log");
  toggle.type = "button";
  let log = chart.log && positive, plot = null;
  top.append(element("h3", chart.title));
  if (positive) top.append(toggle);
  card.append(top);
  where.append(card);
  const names = labels(chart), kinds = [...new Set(chart.curves.map((one) => one.name))];
  const muted = () => css("--muted"), grid = { stroke: () => css("--line"), width: 1 };
  const axis = { stroke: muted, grid, ticks: grid, font: "11px system-ui, sans-serif" };
  const options = () => ({
    width: Math.max(200, card.clientWidth - 20),
    height: innerWidth < 600 ? 200 : 230,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    cursor: {
      sync: { key: "forge", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      dataIdx: nearest,
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      bind: { dblclick: () => () => zoom(null) },
    },
    legend: { live: true },
    axes: [
      { ...axis, size: 34, values: (_, values, at, space, step) => brief(values, step) },
      { ...axis, size: 62, values: (_, values, at, space, step) => brief(values, log ? 0 : step) },
    ],
    series: [
      { label: over, value: (_, value) => number(value) },
      ...chart.curves.map((one, at) => ({
        label: names[at],
        stroke: () => color(many ? one.run : at),
        dash: many ? dashes[kinds.indexOf(one.name) % dashes.length] : [],
        width: 1.5,
        points: { show: one.x.length < 60, size: 4 },
        value: (_, value) => number(value),
      })),
    ],
    hooks: {
      draw: [drawMarks],
      setSelect: [selected],
    },
  });
  const build = () => {
    if (plot) { plots.splice(plots.indexOf(plot), 1); plot.destroy(); plot = null; }
    const made = new uPlot(options(), columns(chart), card);
    plot = made;
    plots.push(made);
    made.setScale("x", view ?? everything());
    touches(made);
    toggle.textContent = log ? "linear" : "log";
  };
  toggle.addEventListener("click", () => { log = !log; build(); });
  build();
  card.rebuild = build;
  new ResizeObserver(() => {
    const width = card.clientWidth - 20;
    if (plot && width > 0 && Math.abs(plot.width - width) > 1) plot.setSize({ width, height: plot.height });
  }).observe(card);
}

const rebuild = () => document.querySelectorAll(".chart").forEach((card) => card.rebuild());

// sections -------------------------------------------------------------------
const section = (name) => document.getElementById(name);

function showRuns() {
  const facts = ["loss", "eval/loss", "tokens", "tokens_per_s", "mfu", "memory_gib"];
  const known = facts.filter((name) => data.runs.some((run) => run.last[name]));
  const head = ["run", "state", "step", ...known.map((name) => ({ "eval/loss": "validation loss", tokens_per_s: "tokens/s", memory_gib: "GiB" }[name] ?? name))];
  const rows = data.runs.map((run, index) => {
    const name = element("span"), dot = element("span", undefined, "dot");
    dot.style.background = `var(--c${index % 10})`;
    if (many) name.append(dot);
    name.append(run.name);
    name.title = run.path;
    return [name, run.state, number(run.step) + (run.until === null ? "" : ` of ${number(run.until)}`), ...known.map((fact) => run.last[fact]?.[1])];
  });
  table(head, rows, section("runs"));
  for (const run of data.runs) {
    const told = [run.goodput && `goodput ${run.goodput}`, ...Object.entries(run.machine).map(([key, value]) => `${key} ${value}`)];
    const text = told.filter(Boolean).join("; ");
    if (text) section("runs").append(element("p", many ? `${run.name}: ${text}` : text, "hint"));
  }
}

function showCurves() {
  const grid = document.querySelector("#curves .grid");
  for (const chart of data.charts) if (!chart.more) draw(chart, grid);
  for (const chart of data.charts.filter((one) => one.more)) {
    const box = element("details"), title = element("summary", chart.title);
    box.append(title);
    section("more").append(box);
    box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) draw(chart, box); });
  }
}

function showEvents() {
  const rows = [];
  data.runs.forEach((run) => {
    for (const [step, kind, text] of run.marks) {
      const go = element("button", number(step), "step"), what = element("span", kind, "kind");
      go.type = "button";
      if (kind === "change") what.classList.add("change"); else if (kind !== "start") what.classList.add("bad");
      go.addEventListener("click", () => {
        const index = data.runs.indexOf(run), wide = Math.max(20, run.step / 20);
        zoom({ min: place(index, Math.max(0, step - wide)), max: place(index, step + wide) });
        section("curves").scrollIntoView();
      });
      rows.push([...(many ? [run.name] : []), go, what, text]);
    }
    if (run.marks_left) rows.push([...(many ? [run.name] : []), "", "", `and ${run.marks_left} before`]);
  });
  if (rows.length) table([...(many ? ["run"] : []), "step", "what", ""], rows, section("events"));
}

function showEvaluations() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.last)))].filter((name) => name.startsWith("eval/"));
  const rows = names.sort().map((name) => [name.slice(5), ...data.runs.flatMap((run) => [run.last[name]?.[1] ?? "", run.last[name]?.[0] ?? ""])]);
  if (rows.length) table(["the last of", ...data.runs.flatMap((run) => [many ? run.name : "value", "at step"])], rows, section("evaluations"));
}

function showRest() {
  const head = ["key", ...data.runs.map((run) => run.name)];
  if (data.differences.length) table(head, data.differences, section("differences"));
  for (const run of data.runs) {
    if (run.plan.length) {
      if (many) section("plan").append(element("h3", run.name));
      table(["", "planned", "measured last"], run.plan, section("plan"));
    }
    if (run.checkpoints.length) {
      const line = element("p", many ? `${run.name}: ` : "");
      for (const [step, path] of run.checkpoints) {
        const link = element("a", `step ${number(step)}`);
        link.href = path.split("/").map(encodeURIComponent).join("/");
        link.title = path;
        line.append(link, "  ");
      }
      section("checkpoints").append(line);
    }
    const box = element("details");
    box.append(element("summary", `${run.name}: config.toml`), element("pre", run.config));
    section("configuration").append(box);
  }
}

function start() {
  document.querySelector("h1").textContent = data.title;
  document.querySelector(".made").textContent = `made by forge report at ${data.made}`;
  showRuns();
  showCurves();
  showEvents();
  showEvaluations();
  showRest();
  for (const one of document.querySelectorAll("main section")) {
    const title = one.querySelector("h2");
    if (one.querySelector(".wide, .chart, details, p:not(.hint)")) {
      const link = element("a", title.textContent);
      link.href = `#${one.id}`;
      document.querySelector("nav").append(link);
    } else one.remove();
  }
  for (const option of document.getElementById("over").options) {
    option.disabled = option.value !== "step" && !data.runs.every((run) => run.axes[option.value]?.length > 1);
  }
  document.getElementById("over").addEventListener("change", (event) => { over = event.target.value; view = null; rebuild(); });
  document.getElementById("marks").addEventListener("change", () => plots.forEach((plot) => plot.redraw(false)));
  document.getElementById("whole").addEventListener("click", () => zoom(null));
  document.getElementById("scheme").addEventListener("click", () => {
    const dark = root.classList.contains("dark") || (!root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
    root.classList.toggle("dark", !dark);
    root.classList.toggle("light", dark);
    rebuild();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  root.dataset.charts = plots.length;
}

start();
