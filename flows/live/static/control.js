/** Buttons that stop, resume and label a run, if the server allows it. */

import { post, runPath } from "./api.js";
import { bdi, h, toast } from "./dom.js";
import { store } from "./store.js";

const ACTIONS = {
  stop: { title: "Stop", statuses: ["running"], asks: "It writes a checkpoint and stops. You can resume it later.", done: "The run is asked to stop." },
  resume: {
    title: "Resume", statuses: ["stopped", "failed", "interrupted"],
    asks: "It continues from its newest checkpoint, with a driver on the server's machine.", done: "The run is being resumed.",
  },
};

/** Return the buttons that the run's state allows; none if the server refuses control. */
export function controls(row, done) {
  if (!store.info || !store.info.allow_control) return [];
  const buttons = Object.entries(ACTIONS).filter(([, action]) => action.statuses.includes(row.status))
    .map(([name, action]) => h("button", { type: "button", "data-action": name, onclick: () => confirm(name, action, row, done) }, action.title));
  return [...buttons, h("button", { type: "button", "data-action": "label", onclick: () => label(row, done) }, "Name, tags, note")];
}

/** Ask for a run's name, its tags, and a note to add. */
function label(row, done) {
  const before = Object.entries(row.tags || {}).map(([key, value]) => (value ? `${key}=${value}` : key));
  const name = h("input", { value: row.name || "", maxlength: 200 }), tags = h("textarea", { rows: 3, value: before.join("\n"), placeholder: "model=small\nstage=2" });
  const note = h("textarea", { rows: 3 }), field = (title, input) => h("label", { class: "stacked" }, h("span", {}, title), input);
  const form = h("form", {}, field("Name", name), field("Tags, one a line", tags), field("Add a note", note),
    h("div", { class: "dialog-buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button", {}, "Save")));
  const dialog = h("dialog", { "aria-labelledby": "label-title" }, h("h2", { id: "label-title" }, bdi(row.run_id)), form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const after = tags.value.split("\n").map((each) => each.trim()).filter(Boolean), kept = after.map((each) => each.split("=")[0]);
    const query = new URLSearchParams(name.value === (row.name || "") ? [] : [["name", name.value]]);
    for (const each of after) if (!before.includes(each)) query.append("tag", each);
    for (const each of before) if (!kept.includes(each.split("=")[0])) query.append("untag", each.split("=")[0]);
    if (note.value.trim()) query.append("note", note.value.trim());
    if (await send(runPath(row.run_id, `/labels?${query}`), "Saved.", done)) dialog.close();
  });
  open(dialog);
}

function open(dialog) {
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function confirm(name, action, row, done) {
  const dialog = h("dialog", { "aria-labelledby": "confirm-title" },
    h("h2", { id: "confirm-title" }, `${action.title} `, bdi(row.name || row.run_id), "?"), h("p", {}, action.asks),
    h("div", { class: "dialog-buttons" },
      h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      h("button", { type: "button", class: "urgent", "data-confirm": name, onclick: () => { dialog.close(); send(runPath(row.run_id, `/${name}`), action.done, done); } }, action.title)));
  open(dialog);
}

/** Send a request, say how it went, and return whether it was taken. */
async function send(path, says, done) {
  try {
    await post(path);
    toast(says);
    return true;
  } catch (error) {
    toast(error.hint ? `${error.message} Hint: ${error.hint}` : error.message);
    return false;
  } finally {
    done();
  }
}
