/** Starts the page: shows the view of the address, and passes on what the server tells. */

import { download, get, Stream } from "./api.js";
import { CompareView } from "./compare.js";
import { fill, h, openDialog, showModal, toast } from "./dom.js";
import * as text from "./format.js";
import { RunView } from "./run.js";
import { RunsView } from "./runs.js";
import { shared } from "./shared.js";
import { current, format, list } from "./state.js";
import { load, merge, remove, store } from "./store.js";
import { SweepView } from "./sweep.js";
import { startTheme } from "./theme.js";

/** An address that this page doesn't know, such as one with a typing error. */
class UnknownView {
  constructor(root) {
    fill(root, h("h1", {}, "No such page"), h("p", {}, `This page has no view ${location.hash}.`), h("p", {}, h("a", { href: "#/runs" }, "Show all runs")));
  }

  close() {}

  update() {}
}

const VIEWS = { runs: RunsView, run: RunView, sweep: SweepView, compare: CompareView, unknown: UnknownView };
const main = document.getElementById("main");
let view = null, shown = "", lost = false;

function route() {
  const { view: name, id, params } = current();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown === `${name} ${id}` && name !== "unknown") return view.update(params);
  const before = shown, isInside = [document.body, share].includes(document.activeElement) || main.contains(document.activeElement);
  if (view) view.close();
  if (before && isInside) main.focus({ preventScroll: true });  // what had the focus goes away with its view
  shown = `${name} ${id}`;
  document.title = "hlatctl";
  document.documentElement.dataset.view = name;
  share.hidden = Boolean(shared) || !["run", "sweep", "compare"].includes(name);
  view = new VIEWS[name](main, params, id);
  if (before && isInside && name === "runs") view.focusRun(before.slice(before.indexOf(" ") + 1));
  const followed = name === "run" ? id : "";
  if (stream.run !== followed) stream.follow(followed);
}

function onEvent(name, data, revision) {
  if (name === "rows") {
    merge(data, revision);
    view.rows?.(data);
  } else if (name === "removed") {
    remove(data, revision);
    view.rows?.([]);
    view.removed?.(data);
  } else if (name === "complete") {
    store.complete = true;
    view.rows?.([]);
  } else if (name === "run") view.event?.(data);
  else if (name === "servers" && store.info) {
    store.info.servers = data;
    serversAt = Date.now();
    drawServers();
    view.soon?.();  // a run's links to them
  }
}

/** Show whether what is shown is current. */
async function onState(state) {
  const banner = document.getElementById("connection");
  if (state === "open") {
    if (lost || !store.loaded) await refresh();
    lost = false;
    banner.hidden = true;
    return;
  }
  lost = true;
  document.documentElement.dataset.stale = "1";
  banner.hidden = false;
  banner.textContent = state === "refused"
    ? "The server refuses this page: its token is missing or has changed. Open the link that `hlatctl ui` printed."
    : `The server does not answer. What is shown is from ${text.time(stream.heardAt / 1000)}. Trying again every second; start it with \`hlatctl ui\`.`;
}

async function refresh() {
  const again = lost;
  try {
    await load(() => { stream.revision = store.revision; serversAt = Date.now(); drawServers(); view.rows?.([...store.rows.values()]); });
    if (again) view.again?.();
    delete document.documentElement.dataset.stale;
  } catch (error) {
    if (!store.loaded) fill(main, h("p", { class: "problem" }, error.message), h("p", {}, error.hint));
  }
}

/** When the state of the servers was told: they tell it only when it changes. */
let serversAt = 0;
/** Between two updates of the time that they have been starting. */
const SERVERS_MS = 5000;
let serversTimer = 0;

/** Show the state of Prefect's and MLflow's servers. */
function drawServers() {
  clearTimeout(serversTimer);
  if (Object.values(store.info?.servers || {}).some((server) => server.state === "starting")) serversTimer = setTimeout(drawServers, SERVERS_MS);
  const titles = { prefect: "Prefect", mlflow: "MLflow" };
  fill(document.getElementById("servers"), Object.entries(titles).map(([name, title]) => {
    const server = store.info?.servers?.[name];
    if (!server || server.state === "off") return null;
    const says = { starting: `starting, ${text.duration(server.waited_s + (Date.now() - serversAt) / 1000)}`, up: "", failed: "failed" }[server.state];
    const label = [title, says].filter(Boolean).join(": "), hint = [server.message, server.log && `log: ${server.log}`].filter(Boolean).join("\n");
    const link = server.state === "up" && /^http:\/\//.test(server.url || "");
    return link ? h("a", { href: server.url, target: "_blank", rel: "noopener", "data-state": "up", title: hint }, label) : h("span", { "data-state": server.state, title: hint }, label);
  }));
}

let chord = "";

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.matches("input:not([type=checkbox]):not([type=range]), select, textarea")) {
    if (event.key === "Escape") main.focus();
    return;
  }
  const before = chord;
  chord = event.key === "g" ? "g" : "";
  if (event.key === "?") showHelp();
  else if (event.key === "/") focusFilter(event);
  else if (["ArrowDown", "ArrowUp"].includes(event.key) && view.focus && [document.body, main].includes(document.activeElement)) {
    event.preventDefault();
    view.focus(0);
  } else if (before === "g" && event.key === "r") location.hash = "#/runs";
  else if (before === "g" && event.key === "c") location.hash = format({ view: "compare", params: { runs: current().params.sel || current().params.runs || current().id } });
}

function focusFilter(event) {
  event.preventDefault();
  if (current().view !== "runs") {
    location.hash = "#/runs";
    route();
  }
  document.getElementById("filter").focus();
}

/** A hidden page gives its connection back: a browser opens few to one server, and each page needs one. */
const HIDDEN_MS = 30_000;
let hiding = 0;

function onVisibility() {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => stream.close(), HIDDEN_MS);
  else if (stream.isClosed) {
    lost = true; // what has changed meanwhile is read again
    stream.connect();
  }
}

/** Offer this view as one file, which needs no server, and its numbers as Markdown. */
function showShare() {
  const now = current(), { view: name, id, params } = now, runs = name === "run" ? [id] : name === "compare" ? list(params.runs) : [];
  const query = { runs: runs.join(","), sweep: name === "sweep" ? id : "" }, says = h("div", { role: "status" });
  const button = (title, meanwhile, work) => h("button", { type: "button", onclick: async () => {
    fill(says, h("p", { class: "empty" }, meanwhile));
    try {
      fill(says, await work());
    } catch (error) {
      fill(says, h("p", { class: "problem" }, error.message), error.hint && h("p", {}, `Hint: ${error.hint}`));
    }
  } }, title);
  const save = async () => {
    const size = await download(`/api/share?${new URLSearchParams({ ...query, view: format(now) })}`, `${id || "compare"}.html`);
    return `${text.bytes(size)} are being saved.`;
  };
  const copy = async () => {
    const { markdown } = await get("/api/markdown", { ...query, baselines: params.baselines });
    const shown = h("textarea", { rows: 8, readonly: true, "aria-label": "Markdown", value: markdown });
    const isCopied = await navigator.clipboard.writeText(markdown).then(() => true, () => false);
    return [h("p", {}, isCopied ? "Copied:" : "This browser doesn't let the page copy. Select the text and copy it:"), h("div", { class: "stacked" }, shown)];
  };
  const dialog = openDialog("Share", h("p", {}, "The file opens in any browser, without a server or a network. The Markdown has the numbers as tables, for a chat or a document."), says,
    h("div", { class: "dialog-buttons" }, button("Save as file", "Writing the file.", save), button("Copy Markdown", "Reading.", copy), h("button", { type: "button", onclick: () => dialog.close() }, "Close")));
}

/** Say what a shared file is, and show the view for which it was made. */
function startShared() {
  if (!location.hash) history.replaceState(null, "", shared.view);
  const made = `A copy of ${text.time(shared.made_unix_s)}, made by hlatctl ${shared.info.version}. It doesn't change.`;
  main.before(h("aside", { class: "banner copy", "aria-label": "About this copy" }, [made, ...shared.notes].join(" ")));
}

const share = document.getElementById("share");
share.addEventListener("click", showShare);
const showHelp = () => showModal(document.getElementById("help"));

const stream = new Stream(onEvent, onState);
if (shared) startShared();
startTheme(() => view?.themed?.());
document.getElementById("help-button").addEventListener("click", showHelp);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address holds the view
  main.focus();
});
addEventListener("keydown", onKey);
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", onVisibility);
route();
if (!stream.run) stream.connect();
