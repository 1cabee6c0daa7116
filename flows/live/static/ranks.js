/** The times of a run's ranks: a heat map, and the least, median and largest time of each window. */

import { Chart, faint, stroke, xAxis } from "./charts.js";
import { h } from "./dom.js";
import { LineChart } from "./lines.js";
import { escaped } from "./metrics.js";

export class RankTimes {
  /** @param {Crosshair} crosshair - its place `step` is where these charts show it. */
  constructor(crosshair) {
    this.range = new LineChart("Time of all ranks (s)", { crosshair, along: "step" });
    this.map = new Chart("Time of the slowest ranks (s)", { crosshair, along: "step" });
    this.node = h("div", { class: "charts whole" }, this.range.node, this.map.node);
  }

  close() {
    this.range.close();
    this.map.close();
  }

  /** @param {object} times - an answer of `/ranks`. */
  async draw(times) {
    const work = times.what === "product" ? "a matrix product" : "own work";
    this.range.title.textContent = `Time of all ranks for ${work} (s)`;
    this.map.title.textContent = `Time of the slowest ranks for ${work} (s)`;
    const slowest = times.steps.map((step, index) => `rank ${times.slowest_rank[index]} ${escaped(times.host[index])}`);
    const line = { x: times.steps, type: "scatter", mode: "lines" }, { color } = stroke(0);
    const traces = [
      { ...line, y: times.min_s, name: "least", line: { width: 0 }, hoverinfo: "skip" },
      { ...line, y: times.max_s, name: "largest", line: { width: 1, color: stroke(1).color }, fill: "tonexty", fillcolor: faint(color, 0.15), meta: { words: slowest } },
      { ...line, y: times.median_s, name: "median", line: { width: 1.6, color } },
    ];
    this.range.draw(traces, { x: xAxis("step") });
    this.map.node.hidden = times.ranks.length < 2;
    if (this.map.node.hidden) return;
    const cells = { type: "heatmap", x: times.steps, y: times.ranks.map(String), z: times.seconds, colorscale: "Cividis", hoverongaps: false, hovertemplate: "rank %{y}, step %{x}: %{z:.4~g} s<extra></extra>" };
    await this.map.draw([cells], { x: xAxis("step"), y: { title: "rank", type: "category" }, layout: { hovermode: "closest" } }).catch(() => {});
  }
}
