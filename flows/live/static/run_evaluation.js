/** A run's milestones: scores over tokens, the progress of evaluations, and the items of their tasks. */

import { Chart, LEGEND, stroke, xAxis } from "./charts.js";
import { bar, bdi, chip, fill, h, table } from "./dom.js";
import * as text from "./format.js";
import { escaped } from "./metrics.js";
import { ItemsPanel } from "./run_items.js";

export class EvaluationTab {
  constructor(root, id, params, change) {
    this.root = root;
    this.progress = h("section", {});
    this.chart = new Chart("Headline scores over tokens", { tall: true });
    this.bits = new Chart("Bits per byte of right answers over tokens; less is better", { tall: true });
    this.scores = h("section", {});
    const items = h("section", {});
    this.items = new ItemsPanel(items, id, params, change);
    fill(root, this.progress, this.chart.node, this.bits.node, this.scores, items);
  }

  close() {
    this.chart.close();
    this.bits.close();
    this.items.close();
  }

  show(details) {
    const signature = JSON.stringify([details.evaluations, details.evaluation_queue, details.milestones]);
    if (this.signature === signature) return;
    Object.assign(this, { signature, details });
    this.draw();
    this.items.refresh().then(() => { if (!this.items.closed) this.drawScores(details.milestones); });
  }

  themed() {
    this.draw();
  }

  draw() {
    const { evaluations, evaluation_queue: queue, milestones } = this.details;
    fill(this.progress, evaluations.length > 0 && h("h2", {}, "Running evaluations"), evaluations.map((each) => {
      const says = !each.is_live ? "no process works on it" : each.total ? `${text.whole(each.done)} of ${text.whole(each.total)} answers` : "starting";
      return h("p", { class: "evaluation" }, `${text.count(each.tokens)} tokens: `, bdi(each.task || "starting"), " ", bar(each.total ? each.done / each.total : 0, says), h("small", {}, ` ${says}`));
    }), queue.map((line) => h("p", { class: "evaluation" }, line)));
    this.drawScores(milestones);
    const scored = milestones.filter((each) => Object.keys(each.scores).length);
    const shown = namesOf(scored).filter((name) => !name.startsWith("validation_") && scored.some((each) => each.scores[name]?.headline));
    drawChart(this.chart, scored, shown);
    drawChart(this.bits, scored, shown.map((name) => `${name}_bpb`).filter((name) => scored.some((each) => each.scores[name])));
  }

  drawScores(milestones) {
    if (!milestones.length) {
      fill(this.scores, h("p", { class: "empty" }, "This run has no milestone yet."));
      return;
    }
    const names = namesOf(milestones);
    const rows = [...milestones].reverse().map((each) => [text.count(each.tokens), text.whole(each.step), chip(each.status), ...names.map((name) => text.score(each.scores[name]))]);
    const guessed = names.map((name) => chanceOf(milestones, name));
    if (guessed.some((each) => each !== null)) rows.push(["guessing", "", "", ...guessed.map((each) => (each === null ? "–" : text.number(each, 3)))]);
    fill(this.scores, h("h2", {}, "Milestones"), table("Milestones", ["tokens", "step", "status", ...names.map((name) => this.head(name))], rows));
  }

  /** A score's name, and below it a link to the task's items. */
  head(name) {
    if (!this.items.has(name)) return bdi(name);
    return h("span", {}, bdi(name), h("button", { type: "button", class: "small", onclick: () => this.items.open(name) }, "show items"));
  }
}

/** Draw scores over tokens with their standard errors, and the score of guessing as a dashed line. */
function drawChart(chart, milestones, names) {
  chart.node.hidden = !names.length || milestones.length < 2;  // one point is no curve: the table has it
  if (chart.node.hidden) return;
  const ends = [milestones[0].tokens, milestones[milestones.length - 1].tokens];
  const lines = names.flatMap((name, index) => {
    const shown = milestones.filter((each) => each.scores[name]), line = stroke(index), chance = chanceOf(milestones, name);
    const scores = {
      type: "scatter", mode: "lines+markers", name: escaped(name), x: shown.map((each) => each.tokens), y: shown.map((each) => each.scores[name].value),
      error_y: { type: "data", array: shown.map((each) => each.scores[name].stderr ?? 0), thickness: 1, width: 2 }, line, marker: { color: line.color },
    };
    const guessing = {
      type: "scatter", mode: "lines", name: `${escaped(name)}: guessing`, x: ends, y: [chance, chance], line: { color: line.color, dash: "dash", width: 1 }, showlegend: false,
    };
    return chance === null ? [scores] : [scores, guessing];
  });
  chart.draw(lines, { x: xAxis("tokens", {}), layout: { showlegend: true, legend: LEGEND } }).catch(() => {});
}

/** Return the newest score of guessing at a task; null if none is known. */
function chanceOf(milestones, name) {
  return milestones.map((each) => each.scores[name]?.chance ?? null).filter((each) => each !== null).pop() ?? null;
}

function namesOf(milestones) {
  return [...new Set(milestones.flatMap((each) => Object.keys(each.scores)))].sort();
}
