/** The view in the page's address: `#/runs?q=tiny`, `#/run/ID?tab=logs`, `#/compare?runs=a,b&x=tokens&zoom=0:100`. */

const VIEWS = ["runs", "run", "sweep", "compare"];

/** Return the view, the run's id and the parameters of an address's fragment. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view, id = ""] = path.split("/", 2);
  const params = Object.fromEntries(new URLSearchParams(query));
  return { view: VIEWS.includes(view) ? view : view === "" ? "runs" : "unknown", id: decoded(id), params };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return the fragment of a view. Empty parameters are left out. */
export function format({ view, id = "", params = {} }) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  // Commas, colons and signs are readable in a fragment and need no escape there.
  const query = new URLSearchParams(kept).toString().replace(/%2C/g, ",").replace(/%3A/g, ":").replace(/%3D/g, "=");
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${query ? `?${query}` : ""}`;
}

export const current = () => parse(location.hash);

/** Change parameters of the current view in place: the address changes, and the history does not. */
export function change(changes) {
  const now = current();
  const params = { ...now.params, ...changes };
  history.replaceState(null, "", format({ ...now, params }));
  return current().params;
}

/** Return the elements of a list in a parameter. */
export const list = (text) => (text ? text.split(",").filter(Boolean) : []);

/** Return the two ends of a range in a parameter, `a:b`; null if there is none. */
export function range(text) {
  const ends = (text || "").split(":").map(Number);
  return ends.length === 2 && ends.every(Number.isFinite) && ends[0] !== ends[1] ? ends : null;
}
