// Buttons that write: the form goes by fetch, so that the page stays where it is. Without script the
// same form is a plain POST.

const said = document.getElementById("said");
const csrf = document.querySelector("meta[name=tocsin-csrf]").content;
let timer = 0;

function say(text, good) {
  said.textContent = text;
  said.className = good ? "good" : "bad";
  said.hidden = false;
  clearTimeout(timer);
  if (good) timer = setTimeout(() => { said.hidden = true; }, 8000);
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.method !== "post" || form.dataset.answer === undefined) return;
  event.preventDefault();
  const buttons = form.querySelectorAll("button");
  for (const button of buttons) button.disabled = true;
  say("Sending…", true);
  try {
    const fields = new FormData(form, event.submitter);
    const answer = await fetch(form.action, {
      method: "POST",
      headers: { "x-tocsin-csrf": csrf, accept: "application/json" },
      body: new URLSearchParams(fields),
    });
    const kind = answer.headers.get("content-type") ?? "";
    const text = kind.startsWith("application/json") ? (await answer.json()).said : await answer.text();
    say(text, answer.ok);
    if (answer.ok) form.closest("details.answer")?.removeAttribute("open");
  } catch {
    say("The page does not reach tocsin serve. Nothing is known of what you sent.", false);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
});
