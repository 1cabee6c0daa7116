/** Builds elements. Text from runs is untrusted: children are text nodes or elements, never HTML. */

/**
 * Return a new element.
 * @param {string} tag
 * @param {object} props - attributes; `onclick` and others are listeners, `style` an object, `true` an empty attribute.
 * @param {...(Node|string|number|null|false|Array)} children - null, undefined and false are left out.
 */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) setProperty(node, key, value);
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function setProperty(node, key, value) {
  if (value === null || value === undefined || value === false) return;
  if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
  else if (key === "style") for (const [name, each] of Object.entries(value)) node.style.setProperty(name, each);
  else if (key === "checked" || key === "disabled" || key === "hidden" || key === "value") node[key] = value;
  else node.setAttribute(key, value === true ? "" : String(value));
}

/** Replace the children of an element; the focus stays. */
export function fill(node, ...children) {
  keepingFocus(node, () => node.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false)));
}

const CONTROLS = 'a[href], button:not(:disabled), input:not(:disabled), select, textarea, [tabindex]:not([tabindex="-1"])';
const controlsIn = (root) => [...root.querySelectorAll(CONTROLS)].filter((each) => each.checkVisibility());

/** Return what a control is called, so that it is found again when its part of the page is made again. */
const calledOf = (node) => `${node.closest("[data-key]")?.dataset.key || ""} ${node.tagName} ${node.dataset.focus || node.id || node.getAttribute("aria-label") || node.getAttribute("href") || node.textContent}`;

/**
 * Do something that moves or replaces controls inside an element. The focus stays on the same control, or goes to the
 * new one that is called the same, to the one in its place, or to what is around.
 */
export function keepingFocus(root, work) {
  const held = document.activeElement, isInside = held !== root && root.contains(held);
  const called = isInside && calledOf(held), place = isInside && controlsIn(root).indexOf(held);
  work();
  if (!isInside || document.activeElement === held) return;
  const found = controlsIn(root), again = held.isConnected ? held : found.find((each) => calledOf(each) === called) || found[Math.min(place, found.length - 1)];
  (again || root.closest("dialog, [tabindex]"))?.focus({ preventScroll: true });
}

/** Return untrusted text in an element of its own, so that its direction of writing doesn't leak. */
export function bdi(text, props = {}) {
  return h("bdi", props, text);
}

/** Return the name of a setting. A narrow column breaks it after a dot or an underscore. */
export const keyName = (key) => h("code", { class: "key" }, h("bdi", {}, key.split(/(?<=[._])/).flatMap((part) => [part, h("wbr")])));

/** Return a short text that is never broken into lines. */
export const nobr = (text) => bdi(text, { class: "nobr" });

/** Characters at the end of a name that are never cut: names of runs differ there. */
const TAIL = 10;

/** Return a link to a run. A name that is too long is cut before its end. */
export function runLink(row, props = {}) {
  const name = row.name || row.run_id, cut = Math.max(0, name.length - TAIL);
  return h("a", { href: `#/run/${encodeURIComponent(row.run_id)}`, ...props },
    h("bdi", { class: "name" }, h("span", {}, name.slice(0, cut)), h("span", {}, name.slice(cut))));
}

/** Return a chip with a run's or stage's status. The colour only repeats the word. */
export function chip(status) {
  return h("span", { class: "chip", "data-status": status }, status);
}

/** Return a progress bar: a share from 0 to 1, and what it means in words. */
export function bar(share, label) {
  const percent = `${(100 * Math.min(1, Math.max(0, share || 0))).toFixed(1)}%`;
  return h("span", { class: "bar", role: "img", "aria-label": label, title: label }, h("span", { style: { width: percent } }));
}

/**
 * Return a table.
 * @param {string[]} heads
 * @param {Array<Array>} rows - cells are text or elements.
 */
export function table(caption, heads, rows, props = {}) {
  const cells = (row) => row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell ?? "–")));
  return h("div", { class: props.class ? `scroll-x ${props.class}` : "scroll-x", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))));
}

/** Return a labelled choice. `options` are pairs of value and label. */
export function choice(label, options, value, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) },
    options.map(([each, text]) => h("option", { value: each }, text)));
  select.value = value;
  return h("label", { class: "field" }, h("span", {}, label), select);
}

/** Return a labelled check box. */
export function check(label, checked, onchange) {
  const box = h("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return h("label", { class: "check" }, box, label);
}

/** Show a dialog with a title; closing it removes it. Returns it. */
export function openDialog(title, ...children) {
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => dialog.remove() }, h("h2", { id: "dialog-title" }, title), ...children);
  document.body.append(dialog);
  showModal(dialog);
  return dialog;
}

/** Show a dialog. Closing it gives the focus back, also to a control that was made again meanwhile. */
export function showModal(dialog) {
  const opener = document.activeElement, called = calledOf(opener), main = document.getElementById("main");
  dialog.showModal();
  dialog.addEventListener("close", () => {
    if (opener.isConnected || document.activeElement !== document.body) return;
    (controlsIn(main).find((each) => calledOf(each) === called) || main).focus({ preventScroll: true });
  }, { once: true });
}

let toastTimer = 0;

/** Show a message for some seconds. */
export function toast(text) {
  const node = document.getElementById("toast");
  node.textContent = text;
  node.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { node.hidden = true; }, 6000);
}
