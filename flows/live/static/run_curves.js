/** Live curves of one run. */

import { get, runPath } from "./api.js";
import { AXES, Crosshair, extent, faint, lowerBound, stroke, within, xAxis } from "./charts.js";
import { Curves, placed, valueAt, withoutStart } from "./curves.js";
import { check, choice, fill, h } from "./dom.js";
import * as text from "./format.js";
import { LineChart } from "./lines.js";
import { RankTimes } from "./ranks.js";
import { isSteep, ordered, titled, titleOf, traces } from "./metrics.js";
import { list, range } from "./state.js";

/** Shortest time between two readings of new steps. */
const GROW_MS = 1000;
/** Time between two looks at a run whose journal is still being read. */
const PREVIEW_MS = 2000;
/** Where the browser keeps the pinned charts of all runs. */
const PINNED = "hlatctl-pinned";

export class CurvesTab {
  constructor(root, id, params, change) {
    Object.assign(this, { root, id, params, setParams: change, charts: new Map(), details: null, zoomed: "", crosshair: new Crosshair((ends) => this.zoom(this.curves.whole && within(ends, this.curves.whole.xs[0], this.curves.whole.xs.at(-1)))) });
    this.axis = params.x in AXES ? params.x : "step";
    this.curves = new Curves(id, this.axis, []);
    this.build();
    this.load();
  }

  build() {
    this.smoothing = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.params.smooth || "0", "aria-label": "Smoothing",
      oninput: () => this.change({ smooth: this.smoothing.value === "0" ? "" : this.smoothing.value }),
    });
    this.smoothingText = h("output", {});
    this.legend = h("small", {});
    this.reset = h("button", { type: "button", onclick: () => { this.change({ zoom: "" }); this.crosshair.node.focus(); } }, "Reset zoom");
    this.message = h("p", { class: "empty", role: "status" }, "Loading curves.");
    this.plots = h("div", { class: "charts" });
    const wide = !matchMedia("(max-width: 760px)").matches;
    fill(this.root, h("details", { class: "options", open: wide }, h("summary", {}, "Options"), h("div", { class: "controls" },
      choice("Over", [["step", "steps"], ["tokens", "tokens"], ["time", "time"], ["flops", "FLOPs"]], this.axis, (x) => this.change({ x, zoom: "" })),
      h("label", { class: "field" }, h("span", {}, "Smoothing"), this.smoothing, this.smoothingText),
      check("log y", this.params.logy === "1", (on) => this.change({ logy: on ? "1" : "" })),
      check("log x", this.params.logx === "1", (on) => this.change({ logx: on ? "1" : "" })),
      check("first steps in range", this.params.start === "1", (on) => this.change({ start: on ? "1" : "" })), this.reset,
      this.legend)), this.message, this.crosshair.node, this.plots);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    for (const chart of this.charts.values()) chart.close();
    if (this.heat) this.heat.close();
  }

  change(changes) {
    this.setParams(changes);
    this.update({ ...this.params, ...changes });
  }

  update(params) {
    const axis = params.x in AXES ? params.x : "step";
    this.params = params;
    if (axis !== this.axis) {
      this.axis = axis;
      this.zoomed = "";
      this.curves = new Curves(this.id, axis, []);
      this.load();
    } else this.refresh();
  }

  async load() {
    try {
      await this.curves.load();
    } catch (error) {
      this.message.textContent = `${error.message} ${error.hint || ""}`;
      return;
    }
    if (this.closed) return;
    await this.refresh();
    if (this.curves.whole.preview) this.timer = setTimeout(() => { this.timer = 0; this.load(); }, PREVIEW_MS);
    else this.drawHeat();
  }

  show(details) {
    const restarts = (each) => JSON.stringify([each?.attempts.map((a) => [a.from_step, a.cause, a.lost_tokens]), each?.milestones, each?.amendments]);
    const changed = restarts(this.details) !== restarts(details);
    this.details = details;
    if (changed) this.draw();
  }

  /** Read new steps, at most once a second. */
  grow(fromStep) {
    this.fromStep = Math.min(this.fromStep ?? Infinity, fromStep ?? Infinity);
    this.timer ||= setTimeout(async () => {
      this.timer = 0;
      const from = Number.isFinite(this.fromStep) ? this.fromStep : null;
      this.fromStep = undefined;
      await this.curves.extend(from).catch(() => {});
      if (!this.closed) this.draw();
    }, GROW_MS);
  }

  themed() {
    this.draw();
    this.drawHeat();
  }

  async refresh() {
    this.draw();
    const zoom = this.params.zoom || "";
    if (zoom === this.zoomed) return;
    this.zoomed = zoom;
    await this.curves.zoom(range(zoom)).catch((error) => { this.message.textContent = error.message; });
    if (!this.closed) this.draw();
  }

  draw() {
    const { data } = this.curves;
    if (!data || this.closed) return;
    this.smoothing.value = this.params.smooth || "0";
    this.smoothingText.textContent = Number(this.params.smooth || 0).toFixed(2);
    this.reset.hidden = !this.params.zoom;
    const empty = data.steps.length === 0, marks = this.marks(data), lines = [...this.bands(data), ...marks.filter(({ dash }) => dash).map(vertical)];
    this.legend.textContent = this.occurring(data, marks).join(" · ");
    const { preview } = this.curves.whole;
    this.message.textContent = preview ? `This server reads the run for the first time. Until then, you see ${text.whole(preview)} of its steps.` : empty ? "No step has been trained yet." : "";
    this.crosshair.node.hidden = empty;
    const recorded = (key) => data.series[key] && data.series[key].y.some((y) => y !== null);
    const keys = ordered(data.available).filter((each) => each !== "validation_loss" && recorded(each));
    for (const key of keys) this.drawChart(key, data, lines);
    this.place(keys);
    const at = marks.map(({ x }) => Math.min(data.xs.length - 1, lowerBound(data.xs, x)));
    this.crosshair.set({ x: data.xs, step: data.steps }, (index, reach) => ({
      says: placed(data, index), marks: marks.filter(({ x }) => Math.abs(x - data.xs[index]) <= reach).map(({ says }) => says),
    }), [...new Set(at)].sort((one, other) => one - other));
  }

  drawChart(key, data, marks) {
    if (!this.charts.has(key)) {
      const pin = h("button", { type: "button", class: "pin", onclick: () => this.pin(key) });
      const chart = new LineChart(titled(key), { tall: key === "loss", onZoom: ({ x }) => this.zoom(x), crosshair: this.crosshair, buttons: [pin] });
      this.charts.set(key, Object.assign(chart, { pin }));
      this.plots.append(chart.node);
    }
    const weight = Number(this.params.smooth || 0), line = stroke(0), log = (on) => (on === "1" ? "log" : "linear");
    const lines = traces(data, key, line, { weight });
    if (key === "loss") lines.push(...traces(data, "validation_loss", stroke(1)), ...milestones(data, stroke(4)));
    if (key === "loss" || key === "grad_norm") lines.push(...skipped(data, key, stroke(1)));
    if (key === "grad_norm") lines.push(...spikes(data, stroke(3)));
    const newest = data.series[key].y.findLast((y) => y !== null), ends = data.xs.length > 1 ? [data.xs[0], data.xs.at(-1)] : null;
    this.charts.get(key).draw(lines, {
      x: xAxis(this.axis, { type: log(this.params.logx), range: range(this.params.zoom) || (this.params.logx === "1" ? null : ends) }),
      y: { type: log(this.params.logy), range: this.cut(key, data) },
      shapes: [...marks, ...(key === "grad_norm" ? this.clipping(data) : [])], label: `${titleOf(key)} over ${AXES[this.axis]}; newest value ${text.number(newest)}`,
    });
  }

  /** Put pinned charts first. */
  place(keys) {
    const pinned = list(localStorage.getItem(PINNED)), isPinned = (key) => pinned.includes(key);
    for (const key of keys) {
      const { pin } = this.charts.get(key), says = `${isPinned(key) ? "Unpin" : "Pin"} ${titleOf(key)}`;
      pin.textContent = isPinned(key) ? "★" : "☆";
      pin.setAttribute("aria-pressed", String(isPinned(key)));
      for (const name of ["title", "aria-label"]) pin.setAttribute(name, says);
    }
    const order = [...keys.filter(isPinned), ...keys.filter((key) => !isPinned(key))];
    if (String(order) === this.order) return;
    this.order = String(order);
    this.plots.prepend(...order.map((key) => this.charts.get(key).node));
  }

  pin(key) {
    const pinned = list(localStorage.getItem(PINNED));
    localStorage.setItem(PINNED, (pinned.includes(key) ? pinned.filter((each) => each !== key) : [...pinned, key]).join(","));
    this.draw();
    this.charts.get(key).pin.focus();
  }

  /** The y range without the run's first steps, unless the whole range is asked for, or a logarithmic axis shows them. */
  cut(key, data) {
    if (!isSteep(key) || this.params.start === "1" || this.params.logx === "1" || this.params.zoom) return null;
    const { y, low, high } = data.series[key];
    return withoutStart([y, low, high]);
  }

  /** What the marks of the charts mean, as far as they occur. */
  occurring(data, marks) {
    const { loss } = data.series, isDrawn = (dashed) => marks.some(({ dash }) => dash === dashed);
    return [
      data.milestones.length > 0 && (data.series.validation_loss ? "◆ milestone, orange with its validation loss" : "◆ milestone"),
      isDrawn("dash") && "dashed: restart", isDrawn("dot") && "dotted: amendment", (data.skipped || []).length > 0 && "× skipped step",
      (data.spikes || []).length > 0 && "▲ spike by HLAT's rule", this.clipping(data).length > 0 && "line across the gradient norm: clipping",
      loss?.y.some((y, index) => y !== null && loss.low[index] < loss.high[index]) && "shaded: range of the steps of a point",
    ].filter(Boolean);
  }

  /** The stages of a run as bands with their names. */
  bands(data) {
    const stages = this.details?.training_stages || [], last = data.steps.length - 1;
    const at = (step) => data.xs[Math.min(last, lowerBound(data.steps, step))];
    return stages.filter(({ from_step }) => last >= 0 && from_step <= data.steps[last]).map(({ name, from_step, to_step }, index) => ({
      from: at(from_step), to: at(Math.max(to_step, data.steps[0])), color: faint("#8a8f98", index % 2 ? 0.14 : 0.04), label: name,
    }));
  }

  /** What happened in the drawn steps: where, in words, and the dash of its line. */
  marks(data) {
    const { attempts = [], amendments = [] } = this.details || {};
    const lost = (each) => (each.lost_tokens ? `, lost ${text.count(each.lost_tokens)} tokens` : "");
    const keys = (each) => each.changes.map(({ key, before, after }) => `${key}: ${text.setting(before)} → ${text.setting(after)}`).join("; ");
    const changes = [
      ...attempts.slice(1).map((each, index) => [each.from_step, "dash", `attempt ${each.attempt}: after ${attempts[index].cause || "an unknown end"}${lost(attempts[index])}`]),
      ...amendments.map((each) => [each.from_step, "dot", `amendment: ${keys(each)}`]),
    ].filter(([step]) => step !== null && step >= data.steps[0] && step <= data.steps.at(-1));
    return [
      ...changes.map(([step, dash, says]) => ({ x: data.xs[Math.min(data.xs.length - 1, lowerBound(data.steps, step))], dash, says })),
      ...data.milestones.filter(({ x }) => x !== null).map(({ x, tokens }) => ({ x, says: `milestone at ${text.count(tokens)} tokens` })),
      ...(data.spikes || []).map(({ x, y }) => ({ x, says: `spike by HLAT's rule, gradient norm ${text.number(y)}` })),
      ...(data.skipped || []).map((x) => ({ x, says: "skipped step" })),
    ];
  }

  /** The norm to which gradients are clipped, as a line, if the gradient norm comes near it. */
  clipping(data) {
    const norm = Number(this.details?.config?.["optimizer.max_grad_norm"]), series = data.series.grad_norm;
    const shown = series && (this.cut("grad_norm", data) || extent([{ y: series.low }, { y: series.high }], "y"));
    if (!(norm > 0) || !shown || norm > shown[1] || norm < shown[0]) return [];
    return [{ y: norm, color: stroke(1).color }];
  }

  zoom(x) {
    if (x === undefined) return;
    this.change({ zoom: x ? x.map((end) => Number(end.toPrecision(7))).join(":") : "" });
  }

  /** The times of the ranks, where they are recorded. */
  async drawHeat() {
    const times = await get(runPath(this.id, "/ranks"), { points: 60 }).catch(() => null);
    if (this.closed || !times || times.steps.length < 2) return;
    this.heat ??= new RankTimes(this.crosshair);
    this.plots.append(this.heat.node);
    this.heat.draw(times);
  }
}

/** A vertical line through a chart. */
const vertical = ({ x, dash }) => ({ x, dash, color: faint("#8a8f98", 0.55) });

function milestones(data, { color }) {
  const scored = new Set(data.series.validation_loss?.xs);
  const shown = data.milestones.filter(({ x }) => x !== null && !scored.has(x));
  if (!shown.length || !data.series.loss) return [];
  return [{
    type: "scatter", mode: "markers", name: "milestone", x: shown.map(({ x }) => x),
    y: shown.map(({ x }) => valueAt(data.xs, data.series.loss.y, x)),
    marker: { color, size: 8, symbol: "diamond", line: { width: 1, color: "#00000080" } },
  }];
}

function spikes(data, { color }) {
  const found = data.spikes || [];
  if (!found.length) return [];
  return [{
    type: "scatter", mode: "markers", name: "spike", x: found.map(({ x }) => x), y: found.map(({ y }) => y),
    marker: { color, size: 5, symbol: "triangle-up", atEdge: true },
  }];
}

function skipped(data, key, { color }) {
  const xs = data.skipped || [];
  if (!xs.length) return [];
  return [{
    type: "scatter", mode: "markers", name: "skipped", x: xs, y: xs.map((x) => valueAt(data.xs, data.series[key].y, x)),
    marker: { color, size: 6, symbol: "x-thin", atEdge: true, line: { width: 1.5, color } },
  }];
}
