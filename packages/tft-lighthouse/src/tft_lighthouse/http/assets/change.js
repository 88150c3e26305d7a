// The dialog before a replica is drained or killed. It names the replica and the job, and asks for the secret, which
// stays in this module's memory.

import { byId, setText, shortId } from "./dom.js";

const ANSWER_MS = 20000;
const WHAT = {
  drain: {
    button: "Drain",
    text: "The replica is asked to leave after its running step. It gives its state to those that heal from it, and the others lose no step. Its place stays empty until somebody starts it again.",
    done: "is asked to leave",
  },
  kill: {
    button: "Kill",
    text: "The processes of the replica are asked to end at once, with exit code 1, as if they had crashed. The others repeat the running step without it.",
    done: "is asked to end",
  },
};

let secret = "";
let asked = null; // what the open dialog is about
let announce = () => {};

/** Prepare the dialog. `tell` is called with a sentence when a replica was asked. */
export function prepareDialog(tell) {
  announce = tell;
  const dialog = byId("change");
  byId("change-cancel").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}

/** Ask whether to drain or kill a replica. `what`: "drain" or "kill". */
export function askFirst(what, replicaId, job, hasSecret) {
  asked = { what, replicaId, job, hasSecret };
  const { button, text } = WHAT[what];
  const name = shortId(replicaId);
  setText(byId("change-title"), `${button} ${name} of job ${job}?`);
  setText(byId("change-text"), text);
  setText(byId("change-ok"), `${button} ${name}`);
  setText(byId("change-error"), "");
  byId("change").dataset.what = what;
  byId("change-reason").value = "";
  byId("change-secret-row").hidden = !hasSecret;
  byId("change-secret").required = hasSecret;
  byId("change-secret").value = secret;
  byId("change-ok").disabled = false;
  byId("change").showModal();
  byId("change-cancel").focus(); // a key pressed too often must not kill a replica
}

async function send() {
  const { what, replicaId, job, hasSecret } = asked;
  const headers = {};
  if (hasSecret) {
    secret = byId("change-secret").value.trim();
    if (!/^[\x21-\x7e]+$/.test(secret)) return refuse("The secret is text of letters, digits and signs, without spaces.");
    headers.Authorization = `Bearer ${secret}`;
  }
  const query = new URLSearchParams({ job });
  const reason = byId("change-reason").value.trim();
  if (reason) query.set("reason", reason);
  byId("change-ok").disabled = true;
  setText(byId("change-error"), "");
  try {
    const answer = await fetch(`replica/${encodeURIComponent(replicaId)}/${what}?${query}`, {
      method: "POST",
      credentials: "omit", // the browser must not ask for a password of its own
      headers,
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    if (answer.ok) {
      byId("change").close();
      announce(`${shortId(replicaId)} ${WHAT[what].done}.`);
      return undefined;
    }
    const body = await answer.json().catch(() => ({}));
    if (answer.status === 401) {
      secret = "";
      byId("change-secret").value = "";
      byId("change-secret").focus();
    }
    const why = answer.status === 401 ? "The lighthouse has another secret." : (body.error ?? `status ${answer.status}`);
    return refuse(`Not done: ${why}`);
  } catch (error) {
    return refuse(`The lighthouse did not answer (${error.message}). It is not known whether the replica was asked.`);
  }
}

function refuse(text) {
  byId("change-ok").disabled = false;
  setText(byId("change-error"), text);
}
