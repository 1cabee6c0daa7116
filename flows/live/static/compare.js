/** Runs side by side: their curves, what differs in their configurations, and their scores. */

import { get, runPath } from "./api.js";
import { AXES, Crosshair, stroke, symbolOf, within, xAxis } from "./charts.js";
import { drawScores, PairedPanel, settings } from "./compare_tables.js";
import { Curves, minus, placed, POINTS, smooth, withoutStart } from "./curves.js";
import { check, chip, choice, fill, h, runLink } from "./dom.js";
import * as text from "./format.js";
import { LineChart } from "./lines.js";
import { escaped, isSteep, ordered, titled, titleOf, traces } from "./metrics.js";
import { MOST_COMPARED } from "./runs.js";
import { change, list, range } from "./state.js";
import { store } from "./store.js";

/** Time between two looks at runs that grow. */
const EXTEND_MS = 2000;
/** Markers along a line. */
const MARKERS = 8;

export class CompareView {
  constructor(root, params) {
    Object.assign(this, { root, params, curves: new Map(), charts: new Map(), zoomed: "", steps: new Map(), crosshair: new Crosshair((ends) => this.zoom("", { x: within(ends, ...this.ends) })) });
    this.build();
    this.load();
  }

  get ids() {
    return list(this.params.runs).slice(0, MOST_COMPARED);
  }

  get axis() {
    return this.params.x in AXES ? this.params.x : "tokens";
  }

  get metrics() {
    return this.params.keys ? list(this.params.keys) : ["loss"];
  }

  build() {
    const set = (key) => (value) => this.change({ [key]: value });
    this.smoothing = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.params.smooth || "0", "aria-label": "Smoothing",
      oninput: () => this.change({ smooth: this.smoothing.value === "0" ? "" : this.smoothing.value }),
    });
    this.smoothingText = h("output", {});
    this.reset = h("button", { type: "button", onclick: () => { this.unzoom(); this.crosshair.node.focus(); } }, "Reset zoom");
    this.controls = h("div", { class: "controls" },
      choice("Over", [["tokens", "tokens"], ["step", "steps"], ["time", "time"], ["flops", "FLOPs"]], this.axis,
        (x) => this.change({ x, ...this.withoutZoom() })),
      h("label", { class: "field" }, h("span", {}, "Smoothing"), this.smoothing, this.smoothingText),
      check("log x", this.params.logx === "1", (on) => set("logx")(on ? "1" : "")),
      check("log y", this.params.logy === "1", (on) => set("logy")(on ? "1" : "")),
      check("first steps in range", this.params.start === "1", (on) => set("start")(on ? "1" : "")),
      check("minus the first run", this.params.minus === "1", (on) => set("minus")(on ? "1" : "")), this.reset);
    this.pick = h("div", { class: "controls metrics", role: "group", "aria-label": "Metrics" });
    this.legend = h("ul", { class: "legend", "aria-label": "Runs in the charts" });
    this.message = h("p", { class: "empty", role: "status" }, "Loading.");
    this.plots = h("div", { class: "charts" });
    this.tables = h("div", {});
    fill(this.root, h("h1", {}, "Compare"), this.controls, this.legend, this.pick, this.message, this.crosshair.node, this.plots, this.tables);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    for (const chart of this.charts.values()) chart.close();
    if (this.scores) this.scores.close();
  }

  update(params) {
    const changed = (key) => (params[key] || "") !== (this.params[key] || "");
    const runs = changed("runs"), published = changed("baselines"), reload = runs || changed("x") || changed("keys");
    this.params = params;
    if (reload) this.load(runs);
    else if (published) this.loadTables();
    else this.refresh();
  }

  /** Change the address, and show it. */
  change(changes) {
    this.update(change(changes));
  }

  withoutZoom() {
    const keys = Object.keys(this.params).filter((key) => key === "zoom" || key.startsWith("y."));
    return Object.fromEntries(keys.map((key) => [key, ""]));
  }

  unzoom() {
    this.change(this.withoutZoom());
  }

  /** Read the curves; `withTables`: also what depends on the runs alone. */
  async load(withTables = true) {
    const ids = this.ids, asked = this.asked = `${ids} ${this.axis} ${this.metrics}`;
    this.zoomed = "";
    if (withTables) fill(this.tables);
    const every = await this.width(ids);
    const curves = new Map(ids.map((id) => [id, new Curves(id, this.axis, this.metrics, every)]));
    const results = await Promise.allSettled([...curves.values()].map((each) => each.load()));
    if (this.closed || this.asked !== asked) return;
    const failed = results.map((result, index) => result.status === "rejected" && `${ids[index]}: ${result.reason.message}`);
    const none = results.length && [...curves.values()].every((each) => !each.whole?.steps.length) ? "None of these runs has trained a step yet." : "";
    const isReading = [...curves.values()].some((each) => each.whole?.preview) && "This server reads some of these runs for the first time. Until then, you see some of their steps.";
    this.message.textContent = ids.length ? [...failed, none, isReading].filter(Boolean).join(" ") : "No run is selected. Select runs in the list, then choose Compare.";
    Object.assign(this, { curves, every });
    for (const [id, each] of curves) this.steps.set(id, each.whole ? each.whole.steps.at(-1) || 0 : 0);
    await this.refresh();
    if (isReading) this.timer ||= setTimeout(() => { this.timer = 0; this.load(false); }, EXTEND_MS);
    if (withTables && ids.length) await this.loadTables();
  }

  /** Steps of each point: the same for all runs, so that their points are at the same steps. */
  async width(ids) {
    const newest = await Promise.all(ids.map((id) => store.rows.get(id)?.step
      ?? get(runPath(id, "/curves"), { keys: "loss", points: 1 }).then((answer) => answer.newest_step, () => 0)));
    return Math.max(1, Math.ceil(Math.max(0, ...newest) / POINTS));
  }

  /** The first and the last x of all runs. */
  get ends() {
    const whole = [...this.curves.values()].flatMap(({ whole: found }) => (found?.xs.length ? [found.xs[0], found.xs.at(-1)] : []));
    return [Math.min(...whole), Math.max(...whole)];
  }

  /** The same within a range of x. */
  widthIn(ends) {
    const [low, high] = this.ends, share = Math.abs(ends[1] - ends[0]) / (high - low || 1);
    return Math.max(1, Math.ceil(this.every * Math.min(1, share)));
  }

  /** The published scores in the tables and the chart: a set's name, or none. */
  get published() {
    return this.params.baselines ?? "";
  }

  async loadTables() {
    const runs = this.ids.join(","), baselines = this.published;
    try {
      const answer = await get("/api/compare", { runs, baselines });
      if (this.closed || this.ids.join(",") !== runs || this.published !== baselines) return;
      if (this.scores) this.scores.close();
      this.scores = drawScores(answer, baselines, (name) => this.change({ baselines: name }));
      fill(this.tables, this.scores.node, new PairedPanel(answer.runs.filter((_, index) => answer.milestones[index])).node, settings(answer));
    } catch (error) {
      fill(this.tables, h("p", { class: "problem" }, `${error.message} ${error.hint || ""}`));
    }
  }

  /** Read finer curves if the zoom has changed, and draw. */
  async refresh() {
    this.draw();
    const zoom = this.params.zoom || "";
    if (zoom === this.zoomed) return;
    this.zoomed = zoom;
    const ends = range(zoom), every = ends && this.widthIn(ends);
    await Promise.allSettled([...this.curves.values()].map((curves) => curves.zoom(ends, every)));
    if (!this.closed) this.draw();
  }

  /** Called when rows have changed: read the new part of the curves of the runs that have grown. */
  rows() {
    const grown = this.ids.filter((id) => (store.rows.get(id)?.step || 0) !== this.steps.get(id));
    this.drawLegend();
    if (grown.some((id) => (store.rows.get(id)?.step || 0) > 2 * POINTS * this.every)) return this.load(false);
    if (!grown.length || this.timer) return;
    this.timer = setTimeout(async () => {
      this.timer = 0;
      for (const id of grown) {
        const step = store.rows.get(id)?.step || 0;
        await this.curves.get(id)?.extend(step < this.steps.get(id) ? step : null).catch(() => {});
        this.steps.set(id, step);
      }
      if (!this.closed) this.draw();
    }, EXTEND_MS);
  }

  themed() {
    this.draw();
    if (this.scores) this.scores.draw();
  }

  draw() {
    const weight = Number(this.params.smooth || 0);
    this.smoothing.value = String(weight);
    this.smoothingText.textContent = weight.toFixed(2);
    this.reset.hidden = !Object.keys(this.withoutZoom()).length;
    this.drawLegend();
    const loaded = [...this.curves.values()].filter((curves) => curves.data);
    const available = ordered(loaded.flatMap((curves) => curves.data.available));
    this.drawPick(available);
    const shown = this.metrics.filter((key) => available.includes(key));
    for (const [key, chart] of this.charts) {
      if (!shown.includes(key)) { chart.close(); chart.node.remove(); this.charts.delete(key); }
    }
    for (const key of ordered(shown)) this.drawChart(key, weight);
    const [longest, curves] = [...this.curves].filter(([, each]) => each.data?.xs.length).sort(([, one], [, other]) => other.data.xs.at(-1) - one.data.xs.at(-1))[0] || [];
    this.crosshair.node.hidden = !curves;
    if (curves) this.crosshair.set({ x: curves.data.xs }, (index) => ({ says: [...placed(curves.data, index), `of ${nameOf(longest)}`], marks: [] }));
  }

  drawChart(key, weight) {
    const loaded = [...this.curves.entries()].filter(([, curves]) => curves.data);
    if (!this.charts.has(key)) {
      const chart = new LineChart(titled(key), {
        tall: key === "loss", onZoom: (zoom) => this.zoom(key, zoom), zoomsY: true, crosshair: this.crosshair, onPoint: (name) => this.highlight(name),
      });
      this.charts.set(key, chart);
      this.plots.append(chart.node);
    }
    const lines = loaded.flatMap(([id, curves]) => traces(curves.data, key, stroke(this.ids.indexOf(id)),
      { weight, band: false, name: nameOf(id) }));
    const differs = this.params.minus === "1" && loaded.length > 1 && this.subtract(lines, loaded, key, weight);
    this.charts.get(key).title.textContent = differs ? `${titled(key)}, minus that of ${nameOf(loaded[0][0])}` : titled(key);
    const log = (on) => (on === "1" ? "log" : "linear");
    const markers = lines.filter((line) => line.hoverinfo !== "skip").flatMap((line) => marked(line, symbolOf(this.ids.findIndex((id) => escaped(nameOf(id)) === line.name))));
    this.charts.get(key).draw([...lines, ...markers], {
      x: xAxis(this.axis, { type: log(this.params.logx), range: range(this.params.zoom) }),
      y: { type: differs ? "linear" : log(this.params.logy), range: differs ? range(this.params[`y.${key}`]) : range(this.params[`y.${key}`]) || this.cut(key, lines) },
      label: `${titleOf(key)} of ${text.counted(loaded.length, "run")} over ${AXES[this.axis]}`,
    });
  }

  /** Make lines the differences from the first run. Returns whether they are. */
  subtract(lines, loaded, key, weight) {
    const { data } = loaded[0][1], series = data.series[key];
    if (!series) return false;
    const xs = series.xs || data.xs, other = { xs, ys: series.xs ? series.y : smooth(xs, series.y, weight) };
    for (const line of lines) line.y = minus(line.x, line.y, other);
    return true;
  }

  /** The y range without the runs' first steps, unless the whole range is asked for, or a logarithmic axis shows them. */
  cut(key, lines) {
    if (!isSteep(key) || this.params.start === "1" || this.params.logx === "1" || this.params.zoom) return null;
    return withoutStart(lines.map((line) => line.y));
  }

  zoom(key, { x, y }) {
    const both = (ends) => ends && ends.map((end) => Number(end.toPrecision(6))).join(":");
    if (x === null) this.unzoom();
    else this.change({ ...(x && { zoom: both(x) }), ...(y && { [`y.${key}`]: both(y) }) });
  }

  /** Let the lines with this name stand out; empty: all lines. */
  highlight(name) {
    if (this.highlighted === name) return;
    this.highlighted = name;
    for (const chart of this.charts.values()) chart.highlight(name);
  }

  drawPick(available) {
    if (this.picked !== String(available)) {
      this.picked = String(available);
      fill(this.pick, available.map((key) => h("span", { "data-key": key }, check(titleOf(key), false, (on) => {
        const keys = on ? [...this.metrics, key] : this.metrics.filter((each) => each !== key);
        this.change({ keys: keys.join(",") });
      }))));
    }
    for (const node of this.pick.children) node.querySelector("input").checked = this.metrics.includes(node.dataset.key);
  }

  drawLegend() {
    const ids = this.ids, rows = ids.map((id) => store.rows.get(id) || { run_id: id });
    const signature = JSON.stringify([rows.map((row) => [row.run_id, row.name, row.status]), stroke(0).color]);
    if (this.legendOf === signature) return;
    this.legendOf = signature;
    fill(this.legend, rows.map((row, index) => {
      const { color, dash } = stroke(index), others = ids.filter((each) => each !== row.run_id);
      return h("li", { onmouseenter: () => this.highlight(escaped(nameOf(row.run_id))), onmouseleave: () => this.highlight("") }, h("span", { class: "swatch", "data-dash": dash, style: { "--swatch": color } }, MARKS[symbolOf(index)]), runLink(row),
        row.status && chip(row.status), row.simulated && h("span", { class: "mark" }, "simulated"),
        h("button", { type: "button", class: "small", "aria-label": `Remove ${nameOf(row.run_id)}`, onclick: () => this.change({ runs: others.join(",") }) }, "×"));
    }));
  }
}

/** What the legend shows for a marker. */
const MARKS = { circle: "●", square: "■", "triangle-up": "▲" };

/** Markers along a line, for runs beyond those that differ by colour. */
function marked(line, symbol) {
  const step = Math.max(1, Math.floor(line.x.length / MARKERS)), some = (values) => values.filter((_, at) => at % step === 0);
  return symbol ? [{ type: "scatter", mode: "markers", name: line.name, x: some(line.x), y: some(line.y), hoverinfo: "skip", marker: { color: line.line.color, size: 7, symbol } }] : [];
}

const nameOf = (id) => store.rows.get(id)?.name || id;
