// Headings of the menu have a level, and what can be scrolled is reached by the keyboard (WCAG 2.1.1).
document.addEventListener("DOMContentLoaded", () => {
  for (const one of document.querySelectorAll("p.caption[role=heading]")) one.setAttribute("aria-level", "2");
  const reach = () => {
    for (const one of document.querySelectorAll("pre, div.table-wrapper, .mermaid, .output, .output div")) {
      if (one.scrollWidth > one.clientWidth || one.classList.contains("mermaid")) one.tabIndex = 0;
    }
  };
  reach();
  addEventListener("resize", reach);
});
