// Names for assistive technology what ipywidgets and the theme leave unnamed.
(() => {
  const name = (element, text) => {
    if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
  };
  const described = (element, otherwise) =>
    element.closest(".jupyter-widgets")?.querySelector("label")?.textContent.trim() || otherwise;

  const nameAll = () => {
    for (const handle of document.querySelectorAll(".noUi-handle")) {
      const isRange = handle.parentElement.parentElement.querySelectorAll(".noUi-handle").length > 1;
      const end = { 0: ", from", 1: ", to" }[handle.dataset.handle];
      name(handle, described(handle, "value") + (isRange ? end : ""));
    }
    for (const icon of document.querySelectorAll(".widget-play .jupyter-button > .fa")) {
      const action = [...icon.classList].find((word) => /^fa-/.test(word)).slice(3);
      name(icon.parentElement, action);
    }
    for (const input of document.querySelectorAll(".jupyter-widgets :is(input, select, textarea)"))
      if (!input.hasAttribute("aria-label")) name(input, described(input, input.type));
    // Code that was folded when the theme looked which code scrolls may scroll once it is open.
    for (const code of document.querySelectorAll(".dropdown pre[tabindex='-1']")) code.tabIndex = 0;
    // A list may hold list items only; the bibliography's entries hold links back as well.
    for (const list of document.querySelectorAll(".citation-list[role=list]")) list.removeAttribute("role");
  };

  nameAll();
  new MutationObserver(nameAll).observe(document.body, {
    subtree: true,
    childList: true,
    attributeFilter: ["class"],
  });
})();

// Paper is light: a dark page is printed in the light theme.
(() => {
  const page = document.documentElement;
  let theme = "";
  addEventListener("beforeprint", () => {
    theme = page.dataset.theme;
    page.dataset.theme = "light";
  });
  addEventListener("afterprint", () => (page.dataset.theme = theme));
})();
