/** One run: its state, and tabs with curves, events, evaluations, samples, logs, documents and settings. */

import { get, runPath } from "./api.js";
import { controls } from "./control.js";
import { bar, bdi, chip, fill, h } from "./dom.js";
import * as text from "./format.js";
import { scoresOf, share } from "./rows.js";
import { CurvesTab } from "./run_curves.js";
import { EvaluationTab } from "./run_evaluation.js";
import { HistoryTab } from "./run_history.js";
import { DocumentsTab, LogsTab, SamplesTab, SettingsTab } from "./run_texts.js";
import { change, format } from "./state.js";
import { store } from "./store.js";

/** Shortest time between two readings of the details. */
const DETAILS_MS = 2000;
const TABS = {
  curves: ["Curves", CurvesTab], history: ["History", HistoryTab], evaluation: ["Evaluation", EvaluationTab],
  samples: ["Samples", SamplesTab], logs: ["Logs", LogsTab], documents: ["Documents", DocumentsTab],
  settings: ["Settings", SettingsTab],
};

export class RunView {
  constructor(root, params, id) {
    Object.assign(this, { root, params, id, details: null, tab: null, tabName: "" });
    this.summary = h("div", {}, h("h1", {}, bdi(id)));
    this.actions = h("div", { class: "links" });
    this.header = h("header", { class: "run-header" }, this.summary, this.actions);
    this.tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run", onkeydown: (event) => this.key(event) });
    this.panel = h("div", { id: "panel", role: "tabpanel", tabindex: "0" });
    fill(root, this.header, this.tabs, this.panel);
    fill(this.panel, h("p", { class: "empty" }, "Loading the run."));
    this.drawTabs();
    if (this.name === "curves") this.openTab(); // its request is the first: the details of a long run take longer
    this.load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    if (this.tab) this.tab.close();
  }

  update(params) {
    this.params = params;
    if (!this.details && this.name !== this.tabName) return;
    if (this.name !== this.tabName) this.openTab();
    else if (this.tab.update) this.tab.update(params);
  }

  get name() {
    return this.params.tab in TABS ? this.params.tab : "curves";
  }

  async load() {
    this.timer = 0;
    this.readAt = Date.now();
    try {
      const details = await get(runPath(this.id));
      if (this.closed) return;
      this.details = details;
      if (details.version < this.told) this.soon();
    } catch (error) {
      if (this.closed) return;
      if (error.status === 404 && await this.isSweep()) return location.replace(format({ view: "sweep", id: this.id }));
      this.tabs.hidden = !this.details;
      if (this.details) return;
      this.tab?.close();
      this.tabName = "";
      fill(this.panel, h("p", { class: "problem" }, error.message), h("p", {}, error.hint), h("p", {}, h("a", { href: "#/runs" }, "Show all runs")));
      return;
    }
    this.tabs.hidden = false;
    this.drawHeader();
    if (this.name !== this.tabName) this.openTab();
    else if (this.tab.show) this.tab.show(this.details);
  }

  /** Whether the address is that of a sweep, which has a page of its own. */
  async isSweep() {
    return !this.details && get(`/api/sweeps/${encodeURIComponent(this.id)}`).then(() => true, () => false);
  }

  /** Called when runs were deleted. */
  removed(ids) {
    this.gone ||= ids.includes(this.id);
    if (this.gone) this.drawActions();
  }

  /** Read the details again, not more often than every two seconds. */
  soon() {
    if (this.timer || this.closed) return;
    this.timer = setTimeout(() => this.load(), Math.max(0, this.readAt + DETAILS_MS - Date.now()));
  }

  /** Called when this run's row has changed. */
  rows(changed) {
    if (!changed.some((row) => row.run_id === this.id)) return;
    if (this.details) this.details.row = store.rows.get(this.id);
    this.drawHeader();
    this.soon();
  }

  /** Called when this run's journal has grown. */
  event(data) {
    if (data.run_id !== this.id) return;
    this.told = data.version;
    if (!this.details || this.details.version === data.version) return; // a reading is under way, or was after it
    if (this.tab && this.tab.grow) this.tab.grow(data.curves_from_step);
    this.soon();
  }

  /** Called after the connection came back. */
  again() {
    this.load();
    if (this.tab && this.tab.grow) this.tab.grow(0);
  }

  themed() {
    if (this.tab && this.tab.themed) this.tab.themed();
  }

  openTab() {
    if (this.tab) this.tab.close();
    this.tabName = this.name;
    this.drawTabs();
    fill(this.panel);
    this.panel.setAttribute("aria-labelledby", `tab-${this.tabName}`);
    this.tab = new TABS[this.tabName][1](this.panel, this.id, this.params, (changes) => { this.params = change(changes); });
    if (this.details) this.tab.show(this.details);
  }

  /** Mark the chosen tab. The buttons stay the same, so that focus stays too. */
  drawTabs() {
    const now = this.name;
    if (!this.tabs.childElementCount) {
      fill(this.tabs, Object.entries(TABS).map(([name, [title]]) => h("button", {
        type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", onclick: () => this.choose(name),
      }, title)));
    }
    for (const button of this.tabs.children) {
      const chosen = button.id === `tab-${now}`;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  }

  choose(name) {
    this.update(change({ tab: name === "curves" ? "" : name, zoom: "", attempt: "", file: "", step: "", task: "", tokens: "", since: "", show: "" }));
    this.drawTabs();
    document.getElementById(`tab-${name}`).focus();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const names = Object.keys(TABS);
    this.choose(names[(names.indexOf(this.name) + step + names.length) % names.length]);
  }

  drawHeader() {
    const { details } = this, row = details ? details.row : store.rows.get(this.id);
    if (!row) return;
    document.title = `${row.name || row.run_id} · hlatctl`;
    const says = (details && details.message) || row.problem || row.what;
    fill(this.summary, heading(row), says && h("p", { class: "says" }, bdi(says)), damage(details?.damage), h("p", { class: "about" }, described(row, details)), figures(row));
    // These have the focus while a run grows, so they are made again only if they change.
    const signature = JSON.stringify([row.status, row.name, row.tags, details?.links, details?.evaluator?.is_job, store.info?.allow_control]);
    if (!details || this.actionsOf === signature) return;
    this.actionsOf = signature;
    this.drawActions();
  }

  drawActions() {
    const { details } = this;
    if (this.gone) fill(this.actions, h("p", { class: "problem" }, "This run was deleted or moved. What is shown is the last that was read of it."));
    else fill(this.actions, links(details.links), controls(details, () => this.soon()));
  }
}

function heading(row) {
  return h("div", { class: "heading" }, h("h1", {}, bdi(row.name || row.run_id)), chip(row.status),
    row.simulated && h("span", { class: "mark" }, "simulated: nothing was trained"),
    row.needs_person && h("span", { class: "mark urgent" }, "needs a person"));
}

/** Which lines of the journal are damaged, and what to do. */
function damage(found) {
  if (!found?.count) return null;
  const more = found.count - found.lines.length;
  return h("div", { class: "problem damage" }, h("p", {}, "The journal is damaged. The events of these lines are missing from all that is shown:"),
    h("ul", { class: "plain" }, found.lines.map((line) => h("li", {}, bdi(line))), more > 0 && h("li", {}, `${text.whole(more)} more before; `, h("code", {}, "hlatctl status"), " lists all")),
    h("p", {}, "The run can go on. Check the disk for errors. If a backup has the file, stop the run, restore the file, and resume the run."));
}

function described(row, details) {
  const parts = [row.name && bdi(row.run_id)];
  if (details) {
    parts.push(details.model && bdi(details.model), details.parameters && `${text.count(details.parameters)} parameters`,
      details.hardware && bdi(details.hardware), details.driver && `driver: process ${details.driver.pid} on ${details.driver.host}`,
      details.evaluator && `evaluated by ${details.evaluator.process || "a job that waits"}`);
  }
  if (row.sweep) parts.push(h("span", {}, "sweep ", h("a", { href: format({ view: "sweep", id: row.sweep }) }, bdi(row.sweep))));
  parts.push(row.last_event_unix_s && `last event ${text.time(row.last_event_unix_s)}`);
  return parts.filter(Boolean).flatMap((part, index) => (index ? [" · ", part] : [part]));
}

/** A run's numbers: the loss, the progress and the time left large, the rest in a line. */
function figures(row) {
  const done = share(row), steps = row.total_steps ? `${text.whole(row.step)} of ${text.whole(row.total_steps)}` : text.whole(row.step);
  const large = [
    ["loss", text.number(row.loss)], ["progress", done === null ? null : h("span", {}, text.percent(done), bar(done, `${text.percent(done)} of the steps`))],
    ["time left", row.left_s === null ? null : text.duration(row.left_s)],
  ];
  const small = [
    ["steps", steps], ["tokens", text.count(row.tokens)], ["validation loss", text.number(row.validation_loss)],
    ...scoresOf(row).slice(0, 3).map(([name, value]) => [name, text.number(value, 3)]),
    ["tokens/s", row.tokens_per_s === null ? null : text.number(row.tokens_per_s)], ["MFU", row.mfu === null ? null : text.percent(row.mfu)],
    ["cost", row.cost_usd === null ? null : text.cost(row.cost_usd)],
    ["node-hours", row.node_hours < 100 ? text.number(row.node_hours, 2) : text.whole(row.node_hours)],
  ];
  const listed = (props, shown) => h("dl", props, shown.filter(([, value]) => value !== null && value !== "–" && value !== undefined)
    .map(([name, value]) => h("div", { title: name === "loss" && "of the newest step" }, h("dt", {}, bdi(name)), h("dd", {}, value))));
  return [listed({ class: "tiles" }, large), listed({ class: "figures" }, small)];
}

/** Links to the other views of the run. Only web addresses and paths of this server are links. */
function links(found) {
  const titles = { report: "Report", prefect: "Flow run in Prefect", mlflow: "Run in MLflow" };
  return Object.entries(titles).filter(([name]) => found && /^(https?:\/\/|\/(?!\/))/.test(found[name] || ""))
    .map(([name, title]) => h("a", { class: "button", href: found[name], target: "_blank", rel: "noopener" }, title));
}
