// The last 30 minutes: a lane for each replica, the participants, and the steps per minute, on one time axis.

import { age, clock, draw, duration, keep, make, setText, shortId } from "./dom.js";

const LANE_PX = 16;
const CHART_PX = 48;
const AXIS_PX = 18;
const MINUTES = 30;
const SHOWN_LEAST_MS = 5 * 60000;
const RATE_MS = 60000;
const RATE_LEAST_MS = 8000;
const LANE_HEIGHT = { training: 1, healing: 1, waiting: 0.5, gone: 0.12 }; // so that colour alone says nothing

/** What is known of one job's last 30 minutes. */
export class Timeline {
  constructor() {
    this.clear();
  }

  clear() {
    this.lanes = new Map(); // replica id -> [[since, state], ...]
    this.points = [];
    this.nowMs = 0;
    this.spanMs = MINUTES * 60000; // that the lighthouse keeps
    this.shownMs = SHOWN_LEAST_MS; // the axis of a young job is shorter
  }

  /** Add an answer. It may repeat what is known. */
  add(answer) {
    this.nowMs = answer.now_ms;
    this.spanMs = answer.span_ms;
    const fromMs = answer.now_ms - answer.span_ms;
    const lastPoint = this.points.length ? this.points.at(-1)[0] : 0;
    this.points.push(...answer.points.filter((point) => point[0] > lastPoint));
    this.points = this.points.filter((point) => point[0] >= fromMs);
    for (const lane of answer.lanes) {
      const runs = this.lanes.get(lane.replica_id) ?? [];
      const last = runs.length ? runs.at(-1)[0] : 0;
      runs.push(...lane.runs.filter((run) => run[0] > last));
      this.lanes.set(lane.replica_id, runs);
    }
    for (const [id, runs] of this.lanes) {
      while (runs.length > 1 && runs[1][0] < fromMs) runs.shift();
      if (runs.at(-1)[1] === "gone" && runs.at(-1)[0] < fromMs) this.lanes.delete(id);
    }
    const first = Math.min(answer.now_ms, ...[...this.lanes.values()].map((runs) => runs[0][0]));
    const wanted = Math.ceil((answer.now_ms - first) / SHOWN_LEAST_MS) * SHOWN_LEAST_MS;
    this.shownMs = Math.min(this.spanMs, Math.max(SHOWN_LEAST_MS, wanted));
  }

  /** Return [time, steps per minute] for each point that has one a minute, or at least some seconds, before it. */
  rates() {
    const found = [];
    let first = 0;
    for (const [at, , step] of this.points) {
      while (this.points[first + 1] && at - this.points[first + 1][0] >= RATE_MS) first += 1;
      const [fromMs, , fromStep] = this.points[first];
      if (at - fromMs >= RATE_LEAST_MS) found.push([at, (Math.max(0, step - fromStep) * 60000) / (at - fromMs)]);
    }
    return found;
  }

  /** Return the newest steps per minute, or null. */
  rate() {
    const rates = this.rates();
    return rates.length ? rates.at(-1)[1] : null;
  }
}

/** Show the two charts and the lanes of the replicas `ids`. */
export function showTimeline(timeline, ids) {
  setText(document.getElementById("lanes-title"), `The last ${Math.round(timeline.shownMs / 60000)} minutes`);
  const charts = document.getElementById("charts");
  const participants = timeline.points.map(([at, count]) => [at, count]);
  const series = [
    { name: "participants", points: participants, stepped: true, digits: 0 },
    { name: "steps per minute", points: timeline.rates(), stepped: false, digits: 0 },
  ];
  keep(charts, [...series, { name: "time" }], (each) => each.name, chartRow, (row, each) => {
    const widthPx = row.lastElementChild.clientWidth;
    if (each.name === "time") fill(row.lastElementChild, axis(timeline, widthPx));
    else updateChart(row, each, timeline, widthPx);
  });
  keep(document.getElementById("lanes"), ids, (id) => id, laneRow, (row, id) => {
    updateLane(row, id, timeline.lanes.get(id), timeline);
  });
}

function chartRow(each) {
  const isTime = each.name === "time";
  return make(
    "div",
    { class: isTime ? "row axis" : "row", role: isTime ? null : "group", "aria-label": isTime ? null : each.name },
    make("span", { class: "label" }, make("span", {}, isTime ? "" : each.name), make("small", {})),
    make("div", { class: "plot", "aria-hidden": isTime ? "true" : null }),
  );
}

function updateChart(row, { name, points, stepped }, timeline, widthPx) {
  const values = points.map((point) => point[1]);
  const highest = Math.max(...values, 0);
  const text = values.length
    ? `${number(values.at(-1))} now, ${number(Math.min(...values))} to ${number(highest)}`
    : "not known yet";
  setText(row.querySelector("small"), text);
  const svg = draw("svg", { role: "img", "aria-label": `${name}: ${text}`, width: widthPx, height: CHART_PX });
  const x = (at) => place(timeline, at) * widthPx;
  const y = (value) => CHART_PX - 2 - (value / Math.max(highest, 1)) * (CHART_PX - 8);
  svg.append(...ticks(timeline, widthPx, CHART_PX), draw("line", { class: "base", x1: 0, x2: widthPx, y1: CHART_PX - 1, y2: CHART_PX - 1 }));
  if (points.length) {
    const parts = points.map(([at, value], index) => {
      const to = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      if (index === 0) return `M${to}`;
      return stepped ? `H${x(at).toFixed(1)}V${y(value).toFixed(1)}` : `L${to}`;
    });
    if (stepped) parts.push(`H${widthPx}`);
    svg.append(draw("path", { class: "line", d: parts.join("") }));
  }
  fill(row.lastElementChild, svg);
}

function laneRow(id) {
  return make("li", { class: "row" }, make("span", { class: "label", title: id }, shortId(id)), make("div", { class: "plot" }));
}

function updateLane(row, id, runs, timeline) {
  const plot = row.lastElementChild;
  const widthPx = plot.clientWidth;
  const fromMs = timeline.nowMs - timeline.shownMs;
  const svg = draw("svg", { role: "img", width: widthPx, height: LANE_PX });
  svg.append(...ticks(timeline, widthPx, LANE_PX));
  const lasted = {};
  runs.forEach(([since, state], index) => {
    const begin = Math.max(since, fromMs);
    const end = index + 1 < runs.length ? runs[index + 1][0] : timeline.nowMs;
    lasted[state] = (lasted[state] ?? 0) + end - begin;
    const x = place(timeline, begin) * widthPx;
    const height = Math.max(2, (LANE_HEIGHT[state] ?? 1) * (LANE_PX - 2));
    const width = Math.max(place(timeline, end) * widthPx - x, state === "training" ? 0.5 : 2); // a short fault is seen
    const rect = draw("rect", { class: `lane-${state}`, x: x.toFixed(1), y: LANE_PX - 1 - height, width: width.toFixed(1), height });
    rect.append(draw("title", {}, `${state} from ${clock(since)}, for ${age(end - since)}`));
    svg.append(rect);
  });
  const sums = Object.entries(lasted).map(([state, ms]) => `${state} ${age(ms)}`);
  const [since, state] = runs.at(-1);
  svg.setAttribute("aria-label", `${shortId(id)} is ${state} since ${clock(since)}. In this time: ${sums.join(", ")}.`);
  fill(plot, svg);
}

/** Return where a time is on the axis, from 0 to 1. */
const place = (timeline, at) => Math.min(1, Math.max(0, 1 - (timeline.nowMs - at) / timeline.shownMs));

function marks(timeline, widthPx) {
  const most = widthPx < 480 ? 3 : 6;
  const everyMs = [1, 2, 5, 10].map((minutes) => minutes * 60000).find((each) => timeline.shownMs / each <= most);
  const found = [];
  for (let agoMs = 0; agoMs <= timeline.shownMs; agoMs += everyMs) found.push(agoMs);
  return found;
}

function ticks(timeline, widthPx, heightPx) {
  return marks(timeline, widthPx).map((agoMs) => {
    const x = Math.min(widthPx - 0.5, Math.max(0.5, (1 - agoMs / timeline.shownMs) * widthPx));
    return draw("line", { class: "tick", x1: x, x2: x, y1: 0, y2: heightPx });
  });
}

function axis(timeline, widthPx) {
  const svg = draw("svg", { width: widthPx, height: AXIS_PX });
  for (const agoMs of marks(timeline, widthPx)) {
    const x = (1 - agoMs / timeline.shownMs) * widthPx;
    const anchor = agoMs === 0 ? "end" : agoMs === timeline.shownMs ? "start" : "middle";
    const text = agoMs === 0 ? "now" : `−${duration(agoMs).replace(" 0 s", "")}`;
    svg.append(draw("text", { x, y: AXIS_PX - 5, "text-anchor": anchor }, text));
  }
  return svg;
}

function fill(plot, svg) {
  plot.replaceChildren(svg);
}

const number = (value) => (value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1));
