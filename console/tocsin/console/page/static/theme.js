// Light or dark before the first paint: as the person chose here, else as the system says.
try {
  const chosen = localStorage.getItem("tocsin-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; the system's choice will do.
}
