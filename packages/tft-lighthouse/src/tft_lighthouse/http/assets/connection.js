// The connection to the lighthouse: the status and the timeline at regular times, the incidents as they happen.
//
// All pages ask at the same moments of the lighthouse's clock, so that they share its answers.

const FEW = 200; // replicas; more are asked for less often
const OFTEN_MS = 2000;
const SELDOM_MS = 5000;
const AGAIN_MS = 2000;
const ANSWER_MS = 10000;
const SOON_MS = 150; // incidents come in groups

export class Connection {
  /**
   * `hears` has the methods `status(status)`, `timeline(timeline)`, `incident(incident)`, `restarted()`, `lost(sinceMs,
   * why)` and `found()`. `job` returns the name of the job whose timeline is shown, or null.
   */
  constructor(hears, job) {
    this.hears = hears;
    this.job = job;
    this.startedMs = null; // of the lighthouse
    this.lastChange = 0; // of an incident
    this.known = { job: null, afterMs: 0 }; // of the timeline
    this.heardMs = Date.now();
    this.isLost = false;
    this.timer = null;
    this.asking = false;
    this.askAgain = false;
    this.source = null;
    this.retry = null;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.ask());
    this.ask();
  }

  /** Ask now, because something has changed. */
  ask() {
    clearTimeout(this.timer);
    if (this.asking) {
      this.askAgain = true;
      return;
    }
    this.asking = true;
    this.askAgain = false;
    this.round().then((waitMs) => {
      this.asking = false;
      this.timer = setTimeout(() => this.ask(), this.askAgain ? SOON_MS : waitMs);
    });
  }

  /** Ask for the status and what is new in the timeline. Returns: when to ask again. */
  async round() {
    if (document.hidden && this.startedMs !== null) return SELDOM_MS; // nobody looks
    try {
      const status = await this.get("api/v1/status");
      if (this.startedMs !== status.lighthouse.started_ms) this.follow(status);
      this.hears.status(status);
      await this.askTimeline();
      this.heardMs = Date.now();
      if (this.isLost) {
        this.isLost = false;
        this.hears.found();
      }
      const most = Math.max(0, ...status.jobs.map((job) => job.num_replicas));
      const everyMs = most > FEW ? SELDOM_MS : OFTEN_MS;
      return everyMs - (status.now_ms % everyMs) + 1;
    } catch (error) {
      this.isLost = true;
      this.hears.lost(this.heardMs, error.message);
      return AGAIN_MS;
    }
  }

  async askTimeline() {
    const job = this.job();
    if (job === null) return;
    if (this.known.job !== job) this.known = { job, afterMs: 0 };
    const query = new URLSearchParams({ job, after: String(this.known.afterMs) });
    const timeline = await this.get(`api/v1/timeline?${query}`, [404]); // 404: not looked at yet
    if (timeline === null || this.job() !== job) return;
    this.known.afterMs = timeline.now_ms;
    this.hears.timeline(timeline);
  }

  async get(path, allowed = []) {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (allowed.includes(answer.status)) return null;
    if (!answer.ok) throw new Error(`it answers with status ${answer.status}`);
    return answer.json();
  }

  /** Follow the incidents of a lighthouse that was started now, or that is another one than before. */
  follow(status) {
    const isAnother = this.startedMs !== null;
    this.startedMs = status.lighthouse.started_ms;
    this.lastChange = 0;
    this.known = { job: null, afterMs: 0 };
    if (isAnother) this.hears.restarted(this.startedMs);
    this.listen();
  }

  listen() {
    clearTimeout(this.retry);
    this.source?.close();
    const source = (this.source = new EventSource(`api/v1/events?after=${this.lastChange}`));
    source.addEventListener("incident", (event) => {
      const incident = JSON.parse(event.data);
      this.lastChange = incident.change;
      this.hears.incident(incident);
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.ask(), SOON_MS);
    });
    source.addEventListener("error", () => {
      source.close();
      this.retry = setTimeout(() => this.listen(), AGAIN_MS);
      this.ask(); // it says whether the lighthouse is there
    });
  }
}
