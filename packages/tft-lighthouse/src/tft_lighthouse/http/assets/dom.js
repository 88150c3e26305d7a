// Elements, and text for people. What comes from replicas is only ever set as text or as an attribute's value here,
// so that no name or reason can become markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Make an element with attributes and children; a child is an element or text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  return filled(element, attributes, children);
}

/** Make an SVG element. */
export function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a text only if it differs, so that a screen reader does not read it again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make the children of `parent` those of `items`, in their order. A child stays the same element as long as its key is
 * among the items, so that the focus stays where it is.
 */
export function keep(parent, items, keyOf, create, update) {
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  for (const child of [...parent.children]) if (!wanted.has(child.dataset.key)) child.remove();
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = before.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
}

/** Return a replica id as the logs have it: the name and eight characters of its instance. */
export const shortId = (id) => id.replace(/(:[0-9a-f]{8})-[0-9a-f-]{27}$/, "$1");

/** Return a text in which each replica id is short, and has no more than that many characters. */
export function shortText(text, most = 600) {
  const short = text.replace(/(:[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/g, "$1");
  return short.length > most ? `${short.slice(0, most)}…` : short;
}

/** Return a duration for people: 12 ms, 3.4 s, 2 min 5 s, 3 h 10 min. */
export function duration(ms) {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Return a duration in whole seconds and more, for what is counted all the time. */
export const age = (ms) => duration(Math.floor(Math.max(0, ms) / 1000) * 1000).replace(/^0 ms$/, "0 s").replace(".0", "");

export function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

/** Return a time of day on this machine's clock. */
export const clock = (ms) =>
  new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const time = (ms) => make("time", { datetime: new Date(ms).toISOString() }, clock(ms));

export const words = (name) => name.replaceAll("_", " ");
