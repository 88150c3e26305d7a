// The page: what the connection hears, shown.

import { announcement, Incidents } from "./incidents.js";
import { askFirst, prepareDialog } from "./change.js";
import { showTimeline, Timeline } from "./charts.js";
import { Connection } from "./connection.js";
import { age, byId, bytes, clock, duration, keep, make, setText, shortId, shortText, words } from "./dom.js";

const ROWS_MOST = 100; // of one table; the rest is found by its name
const FRESH_MS = 60000; // an incident from before is not announced
const MARKS = { training: "●", healing: "◐", waiting: "◌", stopped: "■", ended: "✓", starting: "◌", lost: "✕", finished: "✓", left: "↩" };
const GONE = ["lost", "left", "finished"];
const TROUBLED = ["lost", "healing", "waiting", "joining", "left_out", "kept_out", "unheard"];

const incidents = new Incidents();
const timeline = new Timeline();
let status = null;
let timelineOf = null; // the job whose timeline is shown
let isLost = false;
let lostText = null;
let restartedMs = null; // while this page was open

// --- which job -------------------------------------------------------------------------------------------------------

let wanted = ""; // stays when a link leads to another place of the page

function chosenJob() {
  const jobs = status?.jobs ?? [];
  wanted = new URLSearchParams(location.hash.slice(1)).get("job") || wanted;
  return jobs.find((job) => job.name === wanted) ?? jobs[0] ?? null;
}

const chosenName = () => chosenJob()?.name ?? null;
const linkTo = (job) => `#${new URLSearchParams({ job })}`;

// --- the parts -------------------------------------------------------------------------------------------------------

function show() {
  if (status === null) return;
  const job = chosenJob();
  showAbout();
  byId("empty").hidden = job !== null;
  byId("jobs").hidden = status.jobs.length < 2;
  byId("job").hidden = job === null;
  if (job === null) {
    document.title = "no job | tft lighthouse";
    return showEmpty();
  }
  document.title = `${job.state} | ${job.name} | tft lighthouse`;
  if (job.name !== timelineOf) {
    timelineOf = job.name;
    timeline.clear();
  }
  showJobs(job);
  showJob(job);
  showReplicas(job);
  showLanes(job);
  incidents.show(job.name);
  return undefined;
}

function showAbout() {
  const { lighthouse } = status;
  const ready = lighthouse.is_ready ? "" : " A newer lighthouse of its cluster serves the replicas now.";
  const again = restartedMs === null ? "" : ` It was started again at ${clock(restartedMs)}, and its history begins there.`;
  setText(byId("about"), `Version ${lighthouse.version}, up for ${age(status.now_ms - lighthouse.started_ms)}.${again}${ready}`);
}

function showEmpty() {
  const { address, has_secret: hasSecret } = status.lighthouse;
  const lines = [`export TFT_LIGHTHOUSE=${address}`];
  if (hasSecret) lines.push("export TFT_TOKEN_FILE=the file with the lighthouse's secret");
  setText(byId("how-to"), [...lines, "python train.py"].join("\n"));
}

const stateCell = (state) => make("span", { class: `state state-${state}` }, make("span", { "aria-hidden": "true" }, MARKS[state] ?? "◌"), ` ${words(state)}`);

function setState(cell, state) {
  if (cell.dataset.state !== state) {
    cell.dataset.state = state;
    cell.replaceChildren(stateCell(state));
  }
}

/** Return those of `items` that are shown: the found ones, and of many those with a problem first. */
function limited(section, items, textOf, isTroubled) {
  const find = section.querySelector(".find");
  const text = find.querySelector("input").value.trim().toLowerCase();
  find.hidden = items.length <= ROWS_MOST && text === "";
  const found = text === "" ? items : items.filter((item) => textOf(item).toLowerCase().includes(text));
  const first = found.length > ROWS_MOST ? [...found.filter(isTroubled), ...found.filter((each) => !isTroubled(each))] : found;
  setText(find.querySelector(".left"), `${Math.min(found.length, ROWS_MOST)} of ${items.length} are shown.`);
  const shown = new Set(first.slice(0, ROWS_MOST));
  return found.filter((item) => shown.has(item));
}

function showJobs(chosen) {
  const section = byId("jobs");
  const shown = limited(section, status.jobs, (job) => job.name, (job) => !["training", "ended"].includes(job.state));
  keep(
    section.querySelector("tbody"),
    shown,
    (job) => job.name,
    (job) => make("tr", {}, make("th", { scope: "row" }, make("a", { href: linkTo(job.name) }, job.name)), make("td"), make("td", { class: "number" }), make("td", { class: "number" })),
    (row, job) => {
      const [name, state, step, replicas] = row.children;
      if (job === chosen) name.firstChild.setAttribute("aria-current", "true");
      else name.firstChild.removeAttribute("aria-current");
      setState(state, job.state);
      setText(step, String(job.step));
      setText(replicas, String(job.replicas.filter((each) => !GONE.includes(each.state)).length));
    },
  );
}

function showJob(job) {
  const title = byId("job-title");
  if (title.dataset.of !== `${job.name} ${job.state}`) {
    title.dataset.of = `${job.name} ${job.state}`;
    title.replaceChildren(`Job ${job.name} `, stateCell(job.state));
  }
  setText(byId("sentence"), sentenceOf(job));
  keep(byId("warnings"), job.warnings, (each) => each, () => make("li"), (item, text) => setText(item, shortText(text)));
  const members = job.quorum?.num_members ?? 0;
  const rate = timeline.rate();
  const waited = job.waits !== null && job.state === "waiting" ? age(job.waits.lasted_ms) : "nothing";
  const broken = job.quorum?.broken ? `, broken: ${shortText(job.quorum.broken, 100)}` : "";
  const figures = [
    ["step", String(job.step)],
    ["steps per minute", rate === null ? "–" : String(Math.round(rate))],
    ["members", String(members)],
    ["quorum", job.quorum === null ? "none yet" : `${job.quorum.id}, for ${age(job.quorum.age_ms)}${broken}`],
    ["waits", waited === "nothing" ? waited : `for ${waited}`],
  ];
  keep(byId("figures"), figures, (each) => each[0], ([name]) => make("div", {}, make("dt", {}, name), make("dd")), (row, each) => setText(row.lastChild, each[1]));
}

/** Return what the job does, in a sentence that changes only when that changes. */
function sentenceOf(job) {
  const members = job.replicas.filter((each) => each.rank !== null);
  const healing = members.filter((each) => each.state === "healing");
  switch (job.state) {
    case "waiting":
      return `Waiting. ${upper(shortText(withoutSeconds(job.waits.sentence)))}.`;
    case "starting":
      return job.waits === null ? "No quorum has formed yet." : `No quorum has formed yet. ${upper(shortText(withoutSeconds(job.waits.sentence)))}.`;
    case "stopped":
      return "No member of the last quorum lives. The job goes on when replicas connect.";
    case "ended":
      return `The training is over, at step ${job.ended.step}.`;
    default:
      if (healing.length === 0) return `${counted(members.length, "member trains", "members train")}. No replica waits for another one.`;
      return `${counted(members.length - healing.length, "member trains", "members train")}. ${counted(healing.length, "replica receives", "replicas receive")} the live state from a peer: ${healing.slice(0, 5).map((each) => shortId(each.replica_id)).join(", ")}.`;
  }
}

const counted = (count, one, many) => `${count} ${count === 1 ? one : many}`;
const upper = (text) => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}`;
// Each new number would be read aloud; how long the wait lasts stands among the figures.
const withoutSeconds = (text) => text.replace(/ (?:for )?\d+ s(?: ago)?(?=[,:;)]|$)/g, "");

function showReplicas(job) {
  const shown = limited(byId("replicas"), job.replicas, (each) => each.replica_id, (each) => TROUBLED.includes(each.state));
  keep(byId("replicas").querySelector("tbody"), shown, (each) => each.replica_id, (each) => replicaRow(each, job.name), updateReplica);
}

function replicaRow(replica, job) {
  const name = shortId(replica.replica_id);
  const button = (what, title) => {
    const found = make("button", { type: "button", "aria-label": `${title} ${name}` }, title);
    found.addEventListener("click", () => askFirst(what, replica.replica_id, job, status.lighthouse.has_secret));
    return found;
  };
  return make(
    "tr",
    {},
    make("td", { class: "number wide" }),
    make("th", { scope: "row", title: replica.replica_id }, name),
    make("td", {}, make("span"), make("small", {})),
    make("td", { class: "number" }),
    make("td", { class: "wide" }),
    make("td", { class: "number wide" }),
    make("td", { class: "wide address" }),
    make("td", { class: "actions" }, button("drain", "Drain"), button("kill", "Kill")),
  );
}

function updateReplica(row, replica) {
  const [rank, , state, step, phase, own, address, actions] = row.children;
  setText(rank, replica.rank === null ? "" : String(replica.rank));
  setState(state.firstChild, replica.state);
  setText(state.lastChild, detailOf(replica));
  setText(step, String(replica.step));
  setText(phase, replica.phase === null || GONE.includes(replica.state) ? "" : `${replica.phase} for ${duration(replica.phase_ms)}`);
  setText(own, replica.own_step_ms === null ? "" : duration(replica.own_step_ms));
  setText(address, replica.address);
  const isGone = GONE.includes(replica.state) || replica.state === "unheard";
  for (const each of actions.children) each.disabled = isGone || isLost;
}

function detailOf(replica) {
  if (replica.reason !== null) return `${age(replica.gone_ms)} ago: ${shortText(replica.reason, 200)}`;
  if (replica.state === "healing" && replica.healed_bytes > 0) return `${bytes(replica.healed_bytes)} received`;
  return replica.heard_ms === null ? "not heard yet" : `heard ${duration(replica.heard_ms)} ago`;
}

function showLanes(job) {
  const places = new Map(job.replicas.map((each, index) => [each.replica_id, index]));
  const ids = [...timeline.lanes.keys()];
  const begun = (id) => timeline.lanes.get(id)[0][0];
  const isGone = (id) => timeline.lanes.get(id).at(-1)[1] === "gone";
  const isTroubled = (id) => timeline.lanes.get(id).length > 1 && !isGone(id);
  const text = byId("find-replica").value.trim().toLowerCase();
  const found = ids.filter((id) => id.toLowerCase().includes(text));
  const weight = (id) => (isTroubled(id) ? 0 : isGone(id) ? 2 : 1);
  const first = found.sort((a, b) => weight(a) - weight(b) || (places.get(a) ?? 1e9) - (places.get(b) ?? 1e9)).slice(0, ROWS_MOST);
  const name = (id) => id.replace(/:[^:]*$/, "");
  first.sort((a, b) => name(a).localeCompare(name(b), undefined, { numeric: true }) || begun(a) - begun(b));
  showTimeline(timeline, first);
  setText(byId("lanes-left"), found.length > first.length ? `${first.length} of ${found.length} lanes are shown.` : "");
}

// --- what the connection hears ---------------------------------------------------------------------------------------

let isDrawn = true;

/** Show all before the browser's next frame, once, however much is heard until then. */
function showSoon() {
  if (!isDrawn) return;
  isDrawn = false;
  setTimeout(() => {
    isDrawn = true;
    show();
  }, 0);
}

const hears = {
  status(answer) {
    status = answer;
    showSoon();
  },
  timeline(answer) {
    if (answer.job !== timelineOf) {
      timelineOf = answer.job;
      timeline.clear();
    }
    timeline.add(answer);
    showSoon();
  },
  incident(incident) {
    const isNew = incidents.add(incident);
    const isFresh = status !== null && status.now_ms - incident.began_ms < FRESH_MS;
    if (isNew && isFresh) setText(byId("news"), `Job ${incident.job}, ${announcement(incident)}`);
    showSoon();
  },
  restarted(startedMs) {
    incidents.clear();
    timeline.clear();
    timelineOf = null;
    restartedMs = startedMs;
  },
  lost(sinceMs, why) {
    isLost = true;
    lostText ??= `No connection to the lighthouse since ${clock(sinceMs)} (${shortText(why, 100)}). What you see is from then. This page tries again every 2 s; the training goes on without it.`;
    setText(byId("connection"), lostText);
    byId("connection").hidden = false;
    document.body.classList.add("stale");
    showSoon();
  },
  found() {
    isLost = false;
    lostText = null;
    byId("connection").hidden = true;
    setText(byId("connection"), "");
    document.body.classList.remove("stale");
    showSoon();
  },
};

const connection = new Connection(hears, chosenName);
prepareDialog((sentence) => {
  setText(byId("news"), sentence);
  connection.ask();
});
window.addEventListener("hashchange", () => {
  show();
  connection.ask();
});
window.addEventListener("resize", showSoon);
byId("find-job").addEventListener("input", showSoon);
byId("find-replica").addEventListener("input", showSoon);
byId("more").addEventListener("click", () => {
  incidents.shown *= 5;
  showSoon();
});
connection.start();
