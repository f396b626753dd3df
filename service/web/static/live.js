// Keeps a page current: on news from the server it fetches the same page again and changes only what differs, so that
// every rule about what is shown, and all escaping, stays on the server. Without this file the pages work unchanged.
"use strict";
(() => {
  const main = document.querySelector("main");
  const calm = 1000; // milliseconds between two fetches, however many events arrive
  let timer = 0, last = 0, running = false, again = false;

  const morph = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) { old.replaceWith(document.importNode(fresh, true)); return; }
    if (old.nodeType !== Node.ELEMENT_NODE) { old.nodeValue = fresh.nodeValue; return; }
    for (const { name, value } of [...fresh.attributes]) {
      if (name === "src" && old.getAttribute(name) !== value) swapImage(old, value);
      else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    const before = [...old.childNodes], after = [...fresh.childNodes];
    after.forEach((node, at) => { if (before[at]) morph(before[at], node); else old.append(document.importNode(node, true)); });
    before.slice(after.length).forEach((node) => node.remove());
  };

  // The next picture is loaded before it is shown: no flicker.
  const swapImage = (image, source) => {
    const next = new Image();
    next.onload = () => image.setAttribute("src", source);
    next.src = source;
  };

  const refresh = async () => {
    if (running) { again = true; return; }
    running = true;
    last = Date.now();
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const editing = document.activeElement && document.activeElement.closest("form");
        const fresh = page.querySelector("main");
        if (fresh && !editing) { morph(main, fresh); document.title = page.title; prepare(); }
      }
    } catch { /* the next event tries again */ } finally {
      running = false;
      if (again) { again = false; soon(); }
    }
  };
  const soon = () => {
    if (timer) return;
    timer = setTimeout(() => { timer = 0; refresh(); }, Math.max(0, last + (document.hidden ? 10 * calm : calm) - Date.now()));
  };

  const prepare = () => {
    for (const button of document.querySelectorAll("button[data-script][hidden]")) button.hidden = false;
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-script]");
    if (!button) return;
    if (button.dataset.script === "copy") {
      await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent.trim());
      const name = button.textContent;
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = name; }, 1500);
      return;
    }
    button.disabled = true;
    const answer = await fetch(button.dataset.url, { method: "POST", headers: { Accept: "application/json" } });
    const body = await answer.json().catch(() => ({}));
    if (answer.ok && button.dataset.script === "retry" && body.id) { location.href = new URL(encodeURIComponent(body.id), new URL(".", location.href)); return; }
    if (!answer.ok) window.alert([body.detail || body.title || "The request failed.", body.hint].filter(Boolean).join("\n"));
    button.disabled = false;
    soon();
  });

  // A form cannot send JSON by itself, and the service takes nothing else.
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("form[data-script=login]");
    if (!form) return;
    event.preventDefault();
    const body = JSON.stringify({ token: form.elements.token.value.trim() });
    const answer = await fetch(form.dataset.url, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (answer.ok) location.reload();
    else window.alert("That is not a token.");
  });

  // The event stream, read with fetch and not with EventSource: the page already shows what happened up to `data-after`,
  // and only a request of our own can say so. What an event says is not read here: the next fetch of the page shows it.
  const follow = async (address) => {
    const left = new AbortController();
    addEventListener("pagehide", () => left.abort());
    while (!left.signal.aborted && main.dataset.events) {
      try {
        const headers = { Accept: "text/event-stream", "Last-Event-ID": main.dataset.after || "0" };
        const answer = await fetch(address, { headers, cache: "no-store", signal: left.signal });
        if (!answer.ok) throw new Error(answer.statusText);
        for (const reader = answer.body.getReader(); ;) {
          const { done, value } = await reader.read();
          if (done) break;
          if (new TextDecoder().decode(value).includes("event:")) soon();
        }
      } catch { /* the service may be restarting: try again */ }
      soon();
      await new Promise((resume) => setTimeout(resume, 2000));
    }
  };

  const poll = (seconds) => setInterval(() => { if (!document.hidden) soon(); }, seconds * 1000);
  prepare();
  const { events, poll: every } = main.dataset;
  if (events) {
    follow(events);
  } else if (every) {
    poll(Number(every));
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden && (events || every)) soon(); });
})();
