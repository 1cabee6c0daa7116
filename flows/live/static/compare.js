/** Runs side by side: their curves, what differs in their configurations, and their scores. */

import { get } from "./api.js";
import { AXES, Chart, Crosshair, stroke, xAxis } from "./charts.js";
import { drawScores, settings } from "./compare_tables.js";
import { Curves, minus, placed, smooth, withoutStart } from "./curves.js";
import { check, chip, choice, fill, h, runLink } from "./dom.js";
import * as text from "./format.js";
import { escaped, isSteep, ordered, titled, titleOf, traces } from "./metrics.js";
import { MOST_COMPARED } from "./runs.js";
import { change, list, range } from "./state.js";
import { store } from "./store.js";

/** Time between two looks at runs that grow. */
const EXTEND_MS = 2000;

export class CompareView {
  constructor(root, params) {
    Object.assign(this, { root, params, curves: new Map(), charts: new Map(), zoomed: "", steps: new Map(), crosshair: new Crosshair() });
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
    this.reset = h("button", { type: "button", onclick: () => this.unzoom() }, "Reset zoom");
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
    const curves = new Map(ids.map((id) => [id, new Curves(id, this.axis, this.metrics)]));
    const results = await Promise.allSettled([...curves.values()].map((each) => each.load()));
    if (this.closed || this.asked !== asked) return;
    const failed = results.map((result, index) => result.status === "rejected" && `${ids[index]}: ${result.reason.message}`);
    this.message.textContent = ids.length ? failed.filter(Boolean).join(" ") : "No run is selected. Select runs in the list, then choose Compare.";
    this.curves = curves;
    for (const [id, each] of curves) this.steps.set(id, each.whole ? each.whole.steps.at(-1) || 0 : 0);
    await this.refresh();
    if (withTables && ids.length) await this.loadTables();
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
      fill(this.tables, this.scores.node, settings(answer));
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
    await Promise.allSettled([...this.curves.values()].map((curves) => curves.zoom(range(zoom))));
    if (!this.closed) this.draw();
  }

  /** Called when rows have changed: read the new part of the curves of the runs that have grown. */
  rows() {
    const grown = this.ids.filter((id) => (store.rows.get(id)?.step || 0) !== this.steps.get(id));
    this.drawLegend();
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
      const chart = new Chart(titled(key), { tall: key === "loss", onZoom: (zoom) => this.zoom(key, zoom), crosshair: this.crosshair });
      this.charts.set(key, chart);
      this.plots.append(chart.node);
    }
    const lines = loaded.flatMap(([id, curves]) => traces(curves.data, key, stroke(this.ids.indexOf(id)),
      { weight, band: false, name: nameOf(id) }));
    const differs = this.params.minus === "1" && loaded.length > 1 && this.subtract(lines, loaded, key, weight);
    this.charts.get(key).title.textContent = differs ? `${titled(key)}, minus that of ${nameOf(loaded[0][0])}` : titled(key);
    const log = (on) => (on === "1" ? "log" : "linear");
    this.charts.get(key).draw(lines, {
      x: xAxis(this.axis, { type: log(this.params.logx), range: range(this.params.zoom) }),
      y: { type: differs ? "linear" : log(this.params.logy), range: differs ? range(this.params[`y.${key}`]) : range(this.params[`y.${key}`]) || this.cut(key, lines) },
      label: `${titleOf(key)} of ${text.counted(loaded.length, "run")} over ${AXES[this.axis]}`,
    }).catch((error) => { this.message.textContent = error.message; });
  }

  /** Make lines the differences from the first run. Returns whether they are. */
  subtract(lines, loaded, key, weight) {
    const { data } = loaded[0][1], series = data.series[key];
    if (!series) return false;
    const xs = series.xs || data.xs, other = { xs, ys: series.xs ? series.y : smooth(xs, series.y, weight) };
    for (const line of lines) line.y = minus(line.x, line.y, other);
    return true;
  }

  /** The y range without the runs' first steps, unless the whole range is asked for. */
  cut(key, lines) {
    if (!isSteep(key) || this.params.start === "1" || this.params.zoom) return null;
    return withoutStart(lines.map((line) => line.y));
  }

  zoom(key, { x, y }) {
    const both = (ends) => ends && ends.map((end) => Number(end.toPrecision(6))).join(":");
    if (x === null) this.unzoom();
    else this.change({ ...(x && { zoom: both(x) }), ...(y && { [`y.${key}`]: both(y) }) });
  }

  /** Let the lines of one run stand out while its name in the legend is pointed at. */
  highlight(id) {
    for (const { plot, drawn } of this.charts.values()) {
      if (!drawn) continue;
      const opacities = plot.data.map((line) => (id && line.name !== escaped(nameOf(id)) ? 0.15 : 1));
      window.Plotly.restyle(plot, { opacity: opacities });
    }
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
      return h("li", { onmouseenter: () => this.highlight(row.run_id), onmouseleave: () => this.highlight("") }, h("span", { class: "swatch", "data-dash": dash, style: { "--swatch": color } }), runLink(row),
        row.status && chip(row.status), row.simulated && h("span", { class: "mark" }, "simulated"),
        h("button", { type: "button", class: "small", "aria-label": `Remove ${nameOf(row.run_id)}`, onclick: () => this.change({ runs: others.join(",") }) }, "×"));
    }));
  }
}

const nameOf = (id) => store.rows.get(id)?.name || id;
