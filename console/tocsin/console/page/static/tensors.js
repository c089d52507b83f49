// A click on a row of the heat map opens the tensor of that row, as its link in the list does.

document.addEventListener("click", (event) => {
  const picture = event.target.closest("[data-heat] svg");
  if (picture === null) return;
  const names = [...picture.querySelectorAll("text.row")];
  if (names.length === 0) return;
  const distance = (row) => {
    const box = row.getBoundingClientRect();
    return Math.abs((box.top + box.bottom) / 2 - event.clientY);
  };
  const nearest = names.reduce((a, b) => (distance(a) <= distance(b) ? a : b));
  const name = nearest.querySelector("title")?.textContent ?? nearest.textContent;
  const link = [...document.querySelectorAll("a[data-tensor]")].find((one) => one.dataset.tensor === name);
  if (link !== undefined) location.assign(`${link.href}#tensor`);
});
