/** Named views of the list of runs. The browser keeps the names; a view itself is an address, which can be shared. */

import { bdi, fill, h, openDialog, toast } from "./dom.js";
import { format } from "./state.js";

const KEY = "hlatctl-views";

/** Return the address of the view without what is selected and unfolded. */
const addressOf = (params) => format({ view: "runs", params: { ...params, sel: "", open: "" } });

/** Return the saved views as pairs of name and address, in the order of their names. */
function saved() {
  try {
    const found = Object.entries(JSON.parse(localStorage.getItem(KEY) || "{}"));
    return found.filter(([, address]) => String(address).startsWith("#/runs")).sort(([a], [b]) => (a < b ? -1 : 1));
  } catch {
    return [];
  }
}

function keep(views) {
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(views)));
  } catch {
    toast("This browser keeps nothing for this page. Copy the address to keep the view.");
  }
}

/** Return the name of the shown view; empty if it is not saved. */
export function nameOfView(params) {
  const address = addressOf(params);
  return saved().find(([, each]) => each === address)?.[0] || "";
}

/** Show the saved views, and save the shown one. `changed` is called after each change of the names. */
export function showViews(params, changed) {
  const address = addressOf(params), names = h("ul", { class: "views" });
  const name = h("input", { required: true, maxlength: 60, value: nameOfView(params) });
  const draw = () => fill(names, saved().map(([each, target]) => h("li", {},
    h("a", { href: target, "aria-current": target === address ? "true" : null, onclick: () => dialog.close() }, bdi(each)),
    h("button", { type: "button", class: "small", "aria-label": `Remove ${each}`, onclick: () => { keep(saved().filter(([other]) => other !== each)); draw(); changed(); name.focus(); } }, "×"))));
  const form = h("form", {}, h("label", { class: "stacked" }, h("span", {}, "Name of the shown view"), name),
    h("p", { class: "summary" }, "It keeps the filter, columns, order and groups. To share it, copy the page's address."),
    h("div", { class: "dialog-buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close"), h("button", {}, "Save")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keep([...saved().filter(([other]) => other !== name.value.trim()), [name.value.trim(), address]]);
    changed();
    dialog.close();
  });
  const dialog = openDialog("Saved views", names, form);
  draw();
  if (!names.children.length) name.focus();
}
