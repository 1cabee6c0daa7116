/** A long table of which only the visible rows exist. Rows are kept by key, so that focus and selection stay. */

import { h, keepingFocus } from "./dom.js";

/** Rows beyond each edge of the visible part. */
const SPARE = 8;

export class WindowedTable {
  /**
   * @param {HTMLElement} scroller - scrolls.
   * @param {HTMLElement} body - a tbody inside it.
   * @param {(item: any) => {key: string, signature: string, build: () => HTMLElement}} describe - a row is built again
   *   when its signature changes.
   */
  constructor(scroller, body, describe) {
    Object.assign(this, { scroller, body, describe, items: [], shown: new Map(), pending: 0, isNew: false });
    this.before = h("tr", { class: "spacer", "aria-hidden": "true" });
    this.after = h("tr", { class: "spacer", "aria-hidden": "true" });
    scroller.addEventListener("scroll", () => this.soon(), { passive: true });
    this.observer = new ResizeObserver(() => this.soon());
    this.observer.observe(scroller);
  }

  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.pending);
  }

  /** Show other items. */
  set(items) {
    this.items = items;
    this.isNew = true;
    this.soon();
  }

  soon() {
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  get rowHeight() {
    return parseFloat(getComputedStyle(this.scroller).getPropertyValue("--row-height")) || 44;
  }

  /** Scroll so that an item is visible, and draw it. */
  reveal(index) {
    this.scrollTo(index);
    this.draw();
  }

  scrollTo(index) {
    const height = this.rowHeight, top = index * height, { scrollTop, clientHeight } = this.scroller;
    const head = this.body.parentElement.tHead ? this.body.parentElement.tHead.offsetHeight : 0;
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (top + height + head > scrollTop + clientHeight) this.scroller.scrollTop = top + height + head - clientHeight;
  }

  draw() {
    keepingFocus(this.body, () => this.place());
  }

  /** Make the rows of the visible part. If the focused row has moved out of it, that part follows the row. */
  place() {
    const focused = this.isNew && this.body.contains(document.activeElement) && document.activeElement.closest("tr").dataset.key;
    this.isNew = false;
    const at = focused ? this.items.findIndex((item) => this.describe(item).key === focused) : -1, height = this.rowHeight;
    if (at >= 0) this.scrollTo(at);
    const { scrollTop, clientHeight } = this.scroller;
    const first = Math.max(0, Math.floor(scrollTop / height) - SPARE);
    const last = Math.min(this.items.length, Math.ceil((scrollTop + clientHeight) / height) + SPARE);
    const wanted = new Map();
    for (let index = first; index < last; index += 1) {
      const { key, signature, build } = this.describe(this.items[index]);
      const known = this.shown.get(key);
      const entry = known && known.signature === signature ? known : { signature, node: build() };
      entry.node.dataset.key = key;
      if (known && known !== entry) keepingFocus(this.body, () => known.node.replaceWith(entry.node));
      entry.node.setAttribute("aria-rowindex", index + 2);
      entry.node.dataset.index = index;
      wanted.set(key, entry);
    }
    this.shown = wanted;
    this.before.style.height = `${first * height}px`;
    this.after.style.height = `${Math.max(0, this.items.length - last) * height}px`;
    place(this.body, [this.before, ...[...wanted.values()].map((entry) => entry.node), this.after]);
  }
}

/** Give a node these children, and move only those that are elsewhere. */
function place(parent, nodes) {
  const wanted = new Set(nodes);
  for (const node of [...parent.children]) if (!wanted.has(node)) node.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] || null);
  });
}
