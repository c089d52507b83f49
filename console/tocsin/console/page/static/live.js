// Keeps the page as the server has it: regions arrive as server-sent events and replace their own
// kind. The server has escaped all text in them; nothing is built from data here.

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let version = main.dataset.version ?? "";
let source = null;
let skew = Date.now() - Number(main.dataset.now);
const waiting = new Map();

export function age(ms) {
  const s = Math.max(0, Math.floor((Date.now() - skew - ms) / 1000));
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (s >= 2 * size) return `${Math.floor(s / size)} ${unit} ago`;
  return `${s} s ago`;
}

function showAges(root) {
  for (const time of root.querySelectorAll("time[data-ms]")) {
    const text = age(Number(time.dataset.ms));
    if (time.textContent !== text) time.textContent = text;
  }
}

// Who presses a button or types must not have it taken away under the hand.
function busy(element) {
  const active = document.activeElement;
  return element.matches(":active, :has(:active)") ||
    (element.contains(active) && active.matches("input, textarea, select")) ||
    element.querySelector("details.answer[open]") !== null;
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

// The focus stays on the same link or button, which may be another element now.
function keepingFocus(element, change) {
  const active = document.activeElement;
  const had = active !== element && element.contains(active);
  const href = had ? active.getAttribute("href") : null;
  const opened = new Set([...element.querySelectorAll("details[open][id]")].map((one) => one.id));
  change();
  for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
  if (!had) return;
  const again = active.id ? document.getElementById(active.id)
    : [...element.querySelectorAll("a[href]")].find((one) => one.getAttribute("href") === href);
  again?.focus({ preventScroll: true });
}

function replace(element, html) {
  keepingFocus(element, () => element.replaceChildren(parsed(html)));
  showAges(element);
  element.dispatchEvent(new CustomEvent("tocsin:region", { bubbles: true }));
}

function flush() {
  for (const [name, html] of waiting) {
    const element = name === "" ? main
      : main.querySelector(`[data-region="${CSS.escape(name)}"]`);
    if (element !== null && busy(element)) continue;
    waiting.delete(name);
    if (element !== null) replace(element, html);
  }
}

function apply(message) {
  if (message.frame !== undefined) {
    waiting.clear();
    waiting.set("", message.frame);
  } else if (waiting.has("")) {
    // A frame waits that is older than these regions: ask for the newest one.
    waiting.clear();
    version = "";
    connect();
    return;
  } else {
    for (const [name, html] of Object.entries(message.regions)) waiting.set(name, html);
  }
  version = message.version;
  main.dataset.version = version;
  flush();
}

function connect() {
  source?.close();
  if (main.dataset.events === undefined || document.hidden) return;
  source = new EventSource(`${main.dataset.events}&version=${version}`);
  source.addEventListener("open", () => {
    connection.hidden = true;
    main.dataset.live = "yes";
  });
  source.addEventListener("message", (event) => apply(JSON.parse(event.data)));
  source.addEventListener("error", () => lost(source));
}

async function lost(which) {
  main.dataset.live = "no";
  connection.textContent = "The page lost its connection to tocsin serve, and tries again. " +
    "What you see is the last that it got.";
  connection.hidden = false;
  if (which.readyState !== EventSource.CLOSED) return;
  // A stream does not say which status it was refused with.
  const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
  if (which !== source) return;
  if (answer?.status === 401)
    connection.textContent = "Your session is over. Load the page again to log in.";
  else setTimeout(connect, 2000);
}

// A hidden tab costs nothing: browsers allow few connections to one server.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else connect();
});
window.addEventListener("pagehide", () => source?.close());
window.addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
setInterval(() => { showAges(document); flush(); }, 1000);
showAges(document);
connect();
