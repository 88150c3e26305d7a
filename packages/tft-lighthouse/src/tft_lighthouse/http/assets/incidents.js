// The incidents of a job, the newest first: what it was, who, and its phases as bars.

import { clock, draw, duration, keep, make, setText, shortId, shortText, time, words } from "./dom.js";

const KEPT_MOST = 1000; // as the lighthouse keeps
const SHOWN_FIRST = 20;
const BAR_PX = 12;
const NAMES_MOST = 5;
const BESIDE = { heal: ["detect", "quorum"] }; // it goes on beside later phases, and begins after these
const TITLES = {
  start: "Start of the job",
  loss: "Lost",
  leave: "Left",
  finish: "Finished",
  join: "Joined",
  failed_round: "Round that did not commit",
  broken_quorum: "Broken quorum",
  change: "Change of members",
  end: "End of the job",
};

export class Incidents {
  constructor() {
    this.records = new Map();
    this.shown = SHOWN_FIRST;
  }

  clear() {
    this.records.clear();
  }

  /** Add a record or its newer form. Returns: whether it is a new one. */
  add(incident) {
    const isNew = !this.records.has(incident.number);
    this.records.set(incident.number, incident);
    if (this.records.size > KEPT_MOST) this.records.delete(Math.min(...this.records.keys()));
    return isNew;
  }

  /** Show those of a job. */
  show(job) {
    const section = document.getElementById("incidents");
    const found = [...this.records.values()].filter((each) => each.job === job).sort((a, b) => b.number - a.number);
    section.querySelector(".none").hidden = found.length > 0;
    document.getElementById("more").hidden = found.length <= this.shown;
    keep(section.querySelector("ol"), found.slice(0, this.shown), (each) => each.number, createIncident, updateIncident);
  }
}

/** Return an incident in a few words, such as "Lost replica_1:0f3a9c1d". */
export function titleOf(incident) {
  const title = TITLES[incident.kind] ?? words(incident.kind);
  if (incident.kind === "end") return title;
  const names = incident.replica_ids.slice(0, NAMES_MOST).map(shortId);
  const more = incident.num_replicas - names.length;
  return `${title}: ${names.join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}

function createIncident(incident) {
  const id = `incident-${incident.number}`;
  return make(
    "li",
    { value: incident.number, "aria-labelledby": id },
    make("h4", { id }, make("span", {}), " ", make("small", {}, time(incident.began_ms))),
    make("p", { class: "facts" }),
    make("p", { class: "reason" }),
    make("ul", { class: "phases" }),
  );
}

function updateIncident(item, incident) {
  if (item.dataset.change === String(incident.change)) return;
  item.dataset.change = String(incident.change);
  item.className = `incident kind-${incident.kind}`;
  setText(item.querySelector("h4 > span"), titleOf(incident));
  setText(item.querySelector(".facts"), facts(incident));
  const waited = incident.waited_for ? ` Waited for: ${incident.waited_for}.` : "";
  setText(item.querySelector(".reason"), shortText(`Reason: ${incident.reason || "not given"}.${waited}`, 1000));
  const phases = Object.entries(incident.phases_ms);
  const list = item.querySelector(".phases");
  list.setAttribute("aria-label", `Phases, together ${duration(incident.lasted_ms)}`);
  list.replaceChildren(...bars(phases, incident));
}

function facts(incident) {
  const parts = [incident.is_open ? "goes on" : `lasted ${duration(incident.lasted_ms)}`, `step ${incident.step}`];
  if (incident.quorum_after !== null) {
    const before = incident.quorum_before !== null ? `${incident.quorum_before} → ` : "";
    parts.push(`quorum ${before}${incident.quorum_after}`, `members ${incident.members_before} → ${incident.members_after}`);
  }
  return parts.join(" · ");
}

function bars(phases, incident) {
  let atMs = 0;
  const placed = phases.map(([name, ms]) => {
    const after = BESIDE[name];
    const fromMs = after ? after.reduce((sum, each) => sum + (incident.phases_ms[each] ?? 0), 0) : atMs;
    if (!after) atMs += ms;
    return { name, ms, fromMs };
  });
  const wholeMs = Math.max(1, ...placed.map((each) => each.fromMs + each.ms));
  return placed.map(({ name, ms, fromMs }) => {
    const x = (100 * fromMs) / wholeMs;
    const width = Math.max((100 * ms) / wholeMs, 0.5);
    const bar = draw(
      "svg",
      { class: "bar", height: BAR_PX, viewBox: `0 0 100 ${BAR_PX}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { class: "track", x: 0, y: BAR_PX / 2 - 0.5, width: 100, height: 1 }),
      draw("rect", { class: `phase phase-${name}`, x: Math.min(x, 99.5), y: 0, width, height: BAR_PX }),
    );
    return make("li", {}, make("span", { class: "name" }, words(name)), bar, make("span", { class: "value" }, duration(ms)));
  });
}

export const announcement = (incident) => `${clock(incident.began_ms)}: ${titleOf(incident)}`;
