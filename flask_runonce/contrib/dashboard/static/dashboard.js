// Keeps a page that has #live as it would be if it were loaded again. Without this file the pages work, and stand still.
"use strict";

(() => {
  const live = document.getElementById("live");
  if (!live) return;

  const SHORTEST = 2000; // milliseconds between two looks
  const SHARE = 10; // a look may take one part in so many of the server's time
  const trouble = document.getElementById("trouble");
  const beat = document.getElementById("beat");
  const pause = document.getElementById("pause");
  let timer = 0;
  let paused = false;

  async function look() {
    const began = performance.now();
    try {
      const answer = await fetch(live.dataset.source || location.href, { redirect: "manual", cache: "no-store" });
      if (answer.type === "opaqueredirect" || answer.status === 401 || answer.status === 403) {
        say("You are not let in any more. Load the page again.");
        return;
      } else if (answer.status === 200) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        merge(live, document.importNode(page.getElementById("live"), true));
        live.classList.remove("old");
        beat.textContent = `As of ${new Date().toISOString().slice(11, 19)}`;
        say("");
      } else if (answer.status !== 204) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const title = page.querySelector("h1");
        const text = page.getElementById("problem");
        say(title && text ? `${title.textContent}. ${text.textContent}` : `The server answered ${answer.status}.`);
      }
    } catch {
      say("The server does not answer. Trying again.");
    }
    plan(Math.max(SHORTEST, SHARE * (performance.now() - began)));
  }

  function plan(wait) {
    clearTimeout(timer);
    if (!paused && !document.hidden) timer = setTimeout(look, wait);
  }

  function say(text) {
    live.classList.toggle("old", text !== "");
    if (trouble.textContent !== text) trouble.textContent = text;
    trouble.hidden = text === "";
  }

  // Makes `old` equal to `fresh` and keeps each node that has not changed, with its focus, its selection and its place.
  function merge(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
      old.replaceWith(fresh);
      return;
    }
    const own = old.nodeName === "DETAILS" ? ["open"] : []; // what the reader has changed
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !own.includes(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const named = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
    let place = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const same = named.get(child.id);
      if (same) {
        if (same === place) place = place.nextSibling;
        else old.insertBefore(same, place);
        merge(same, child);
      } else if (place && !place.id && !child.id && place.nodeName === child.nodeName) {
        const next = place.nextSibling;
        merge(place, child);
        place = next;
      } else {
        old.insertBefore(child, place);
      }
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  }

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Go on" : "Pause";
    if (paused) clearTimeout(timer);
    else look();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : plan(0)));
  document.getElementById("pulse").hidden = false;
  beat.textContent = `As of ${new Date().toISOString().slice(11, 19)}`;
  plan(SHORTEST);
})();
