/** Buttons and dialogs that change a run or a sweep, if the server allows it; and a run's alerts. */

import { get, post, runPath } from "./api.js";
import { bdi, check, h, fill, showModal, toast } from "./dom.js";
import { store } from "./store.js";

const ENDED = ["created", "stopped", "failed", "interrupted"];
/** Actions that a person confirms. The server says what to read before. */
const ACTIONS = {
  stop: { title: "Stop", statuses: ["running", "stopping"], done: "It is asked to stop." },
  resume: { title: "Resume", statuses: ENDED, done: "The run is being resumed." },
  archive: { title: "Archive", statuses: [...ENDED, "finished"], done: "The run is archived." },
};
const button = (name, title, onclick) => h("button", { type: "button", "data-action": name, onclick }, title);

/** Return the buttons that the run's state allows; only that of its alerts if the server refuses control. */
export function controls({ row, evaluator }, done) {
  const isDamaged = row.status === "damaged", alerting = isDamaged ? [] : [button("alerts", "Alerts", () => alerts(row, done))];
  if (!store.info || !store.info.allow_control) return alerting;
  const confirmed = Object.entries(ACTIONS).filter(([name, action]) => action.statuses.includes(row.status) || (name === "stop" && evaluator?.is_job));
  const buttons = confirmed.map(([name, action]) => button(name, action.title, () => confirm(name, action, row, done)));
  if (!isDamaged && row.status !== "archived") buttons.splice(-1, 0, button("amend", "Amend", () => amend(row, done)));
  return [...buttons, button("label", "Name, tags, note", () => label(row, done)), ...alerting];
}

/** A sweep's actions: `done` is what is said after one. */
const OF_SWEEP = {
  stop: { title: "Stop sweep", statuses: ["running", "stopping", "interrupted"], done: "The sweep is asked to stop." },
  resume: { title: "Resume sweep", statuses: ENDED, done: "The sweep is being resumed." },
};

/** Return the buttons that a sweep's state allows; none if the server refuses control. */
export function sweepControls(details, done) {
  if (!store.info?.allow_control) return [];
  const row = { run_id: details.sweep_id, name: details.name, tags: details.tags, address: `/api/sweeps/${encodeURIComponent(details.sweep_id)}` };
  const confirmed = Object.entries(OF_SWEEP).filter(([, action]) => action.statuses.includes(details.status));
  return [...confirmed.map(([name, action]) => button(name, action.title, () => confirm(name, action, row, done))), button("label", "Name, tags, note", () => label(row, done))];
}

/** The address of a row's run or sweep. */
const pathOf = (row, part) => (row.address ? row.address + part : runPath(row.run_id, part));

const field = (title, input) => h("label", { class: "stacked" }, h("span", {}, title), input);
const lines = (texts) => h("ul", { class: "plain" }, texts.map((text) => h("li", {}, text)));

/**
 * A dialog with a form that sends a request.
 *
 * What the server says of a request stands in the dialog: a message beside it would lie behind its backdrop.
 */
class Dialog {
  constructor(name, title, row, ...parts) {
    this.says = h("div", { role: "status", class: "says" });
    this.send = h("button", { class: name === "stop" || name === "archive" ? "urgent" : "", "data-confirm": name }, title);
    this.cancel = h("button", { type: "button", onclick: () => this.close() }, "Cancel");
    this.form = h("form", { onsubmit: (event) => this.submitted(event) }, ...parts, this.says, h("div", { class: "dialog-buttons" }, this.cancel, this.send));
    this.root = h("dialog", { "aria-labelledby": "dialog-title" }, h("h2", { id: "dialog-title" }, `${title}: `, bdi(row.name || row.run_id)), this.form);
    this.root.addEventListener("close", () => this.root.remove());
    document.body.append(this.root);
    showModal(this.root);
  }

  close() {
    this.root.close();
  }

  onSend(work) {
    this.work = work;
  }

  submitted(event) {
    event.preventDefault();
    if (this.isReady) this.work();
  }

  /** Let the button send; one that doesn't stays a place for the focus. */
  set isReady(on) {
    this.send.setAttribute("aria-disabled", String(!on));
  }

  get isReady() {
    return Boolean(this.work) && this.send.getAttribute("aria-disabled") !== "true";
  }

  /** Do something that asks the server; say so meanwhile, and why it failed. Return its answer, or null. */
  async during(text, work) {
    this.isReady = false;
    fill(this.says, h("p", { class: "empty" }, text));
    try {
      const answer = await work();
      fill(this.says);
      this.isReady = true;
      return answer;
    } catch (error) {
      fill(this.says, h("p", { class: "problem" }, error.message), error.hint ? h("p", {}, `Hint: ${error.hint}`) : null);
      this.failed?.();
      return null;
    }
  }

  /** Send the request that changes the run, and close. */
  async finish(path, says, done) {
    const answer = await this.during("Sending.", () => post(path));
    if (answer) {
      toast(says);
      this.close();
    }
    done();
    return answer;
  }
}

/** Show what an action would do, and do it after a confirmation. */
async function confirm(name, action, row, done) {
  const dialog = new Dialog(name, action.title, row), path = pathOf(row, `/${name}`);
  const found = await dialog.during("Checking.", () => post(`${path}?check=1`));
  if (!found) return;
  fill(dialog.says, ...found.lines.map((line) => h("p", {}, line)));
  dialog.onSend(() => dialog.finish(found.keeps === undefined ? path : `${path}?keeps=${found.keeps}`, action.done, done));
}

/** Ask for changes of the configuration, show what they mean, and make them after a confirmation. */
function amend(row, done) {
  const changes = h("textarea", { rows: 3, placeholder: "optimizer.lr=1e-4", spellcheck: "false", required: true });
  const at = h("input", { placeholder: "a step, or now" }), why = h("input", { maxlength: 1000 });
  const dialog = new Dialog("amend", "Amend", row, field("Changes, one a line", changes), field("Begin after step (empty: as soon as each key may change)", at), field("Reason", why));
  let number = 0;
  const reset = () => {
    number = 0;
    dialog.isReady = true;
    dialog.send.textContent = "Check";
  };
  dialog.failed = reset;
  dialog.form.addEventListener("input", () => { if (number) { reset(); fill(dialog.says); } });
  dialog.onSend(async () => {
    const given = [["at", at.value.trim()], ["why", why.value.trim()], ["number", number || ""], ["check", number ? "" : "1"]];
    const query = new URLSearchParams([...changes.value.split("\n").map((line) => ["set", line.trim()]), ...given].filter(([, value]) => value));
    const path = runPath(row.run_id, `/amend?${query}`);
    if (number) return dialog.finish(path, "The run is amended.", done);
    const found = await dialog.during("Checking, as for a new run.", () => post(path));
    if (!found) return;
    fill(dialog.says, lines(found.lines));
    number = found.number;
    if (number) dialog.send.textContent = "Amend";
  });
  reset();
}

/** Show which messages a run sends, and switch them on and off with an amendment. */
async function alerts(row, done) {
  const list = h("div", {}), dialog = new Dialog("alerts", "Alerts", row, list);
  dialog.send.textContent = "Save";
  dialog.send.hidden = !store.info?.allow_control;
  if (dialog.send.hidden) dialog.cancel.textContent = "Close";
  const found = await dialog.during("Reading.", () => get(runPath(row.run_id, "/alerts")));
  if (!found) return;
  const on = new Set(found.kinds.filter((kind) => kind.on).map((kind) => kind.name));
  const where = found.services.length
    ? h("p", {}, "Messages go to ", found.services.map((each, index) => [index ? ", " : "", h("code", {}, bdi(each))]), ".")
    : h("p", {}, "No service is configured, so no message is sent. ", h("code", {}, `hlatctl amend ${row.run_id} 'notify.urls=[env:NAME]'`), " names one.");
  fill(list, where, h("fieldset", { disabled: dialog.send.hidden }, h("legend", {}, "Send a message when"),
    found.kinds.map((kind) => check(kind.says, kind.on, (isOn) => (isOn ? on.add(kind.name) : on.delete(kind.name))))));
  dialog.onSend(() => {
    const query = new URLSearchParams([["set", `notify.on=[${[...on]}]`], ["number", found.number], ["why", "alerts"]]);
    return dialog.finish(runPath(row.run_id, `/amend?${query}`), "Saved.", done);
  });
}

/** Ask for a run's name, its tags, and a note to add. */
function label(row, done) {
  const before = Object.entries(row.tags || {}).map(([key, value]) => (value ? `${key}=${value}` : key));
  const name = h("input", { value: row.name || "", maxlength: 100 }), tags = h("textarea", { rows: 3, value: before.join("\n"), placeholder: "model=small\nstage=2" });
  const note = h("textarea", { rows: 3, maxlength: 5000 });
  const dialog = new Dialog("label", "Save", row, field("Name", name), field("Tags, one a line", tags), field("Add a note", note));
  dialog.failed = () => { dialog.isReady = true; };
  dialog.onSend(() => {
    const after = tags.value.split("\n").map((each) => each.trim()).filter(Boolean), kept = after.map((each) => each.split("=")[0]);
    const query = new URLSearchParams(name.value === (row.name || "") ? [] : [["name", name.value]]);
    for (const each of after) if (!before.includes(each)) query.append("tag", each);
    for (const each of before) if (!kept.includes(each.split("=")[0])) query.append("untag", each.split("=")[0]);
    if (note.value.trim()) query.append("note", note.value.trim());
    return dialog.finish(pathOf(row, `/labels?${query}`), "Saved.", done);
  });
}
