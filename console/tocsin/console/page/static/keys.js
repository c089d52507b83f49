// What the keyboard does, and the buttons of the header.

const help = document.getElementById("help");

function rows() {
  return [...document.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
}

function move(by) {
  const all = rows();
  if (all.length === 0) return;
  const at = all.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by;
  const row = all[Math.min(Math.max(next, 0), all.length - 1)];
  row.focus();
  row.scrollIntoView({ block: "nearest" });
}

function toggleTheme() {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("tocsin-theme", root.dataset.theme);
  } catch {
    // It holds for this page then.
  }
  document.dispatchEvent(new CustomEvent("tocsin:theme"));
}

function search() {
  const field = document.querySelector("input[type=search]");
  if (field === null) location.assign("/");
  else { field.focus(); field.select(); }
}

function up() {
  const links = document.querySelectorAll(".crumbs a");
  location.assign(links.length ? links[links.length - 1].href : "/");
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  "/": search,
  g: () => location.assign("/"),
  u: up,
  t: toggleTheme,
  "?": () => help.showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const does = help.open ? undefined : KEYS[event.key];
  if (does === undefined) return;
  event.preventDefault();
  does();
});

document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("help-open").addEventListener("click", () => help.showModal());

// A choice in a form of selects takes effect at once; without script there is its button.
document.addEventListener("change", (event) => {
  const form = event.target.closest("form.choices");
  if (form !== null && event.target.matches("select")) form.requestSubmit();
});
