// Unfold has controls that react to the mouse only, such as the menu of the user and the filters of a list. Give them a
// role, a name and the keys of a button. What one of them opens gets the focus. Escape closes it and returns the focus.
const NAMES = { openUserLinks: "Your account and theme", sidebarDesktopOpen: "Show or hide the navigation",
  sidebarMobileOpen: "Show or hide the navigation", openRelatedWidgetWrapper: "Actions for this field", rowOpen: "Show or hide the row" };
const FOCUSABLE = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']";
const wordsOf = control => [...control.childNodes].map(node => node.nodeType === Node.TEXT_NODE ? node.data
  : node.matches?.("[class*=material-symbols], select, script") ? "" : node.textContent).join("").trim();
const variableOf = control => (control.getAttribute("x-on:click") ?? "").match(/^\s*(\w+) = /)?.[1];
const FIELD = ":is(input:not([type=hidden]), select, textarea):not([disabled])";
let opened;

// The text of an icon is its name in the icon font. Screen readers would read it.
function nameIcons() {
  for (const icon of document.querySelectorAll("span[class*=material-symbols]:not([x-on\\:click])")) {
    icon.setAttribute("aria-hidden", "true");
    const control = icon.closest("a[href], button");
    if (!control || control.ariaLabel || wordsOf(control)) continue;
    control.setAttribute("aria-label", control.title || (control.getAttribute("href") === "/admin/" ? "Overview" : icon.textContent.trim()));
  }
}

function close() {
  if (opened) Alpine.$data(opened.control)[opened.variable] = false;
  opened?.control.setAttribute("aria-expanded", "false");
  opened = undefined;
}

function press(control) {
  const variable = variableOf(control);
  control.click();
  if (!variable) return;
  Alpine.nextTick(() => {
    const panel = control.closest("[x-data]")?.querySelector(`[x-show="${variable}"]`) ?? document.querySelector(`[x-show="${variable}"]`);
    if (!panel || !Alpine.$data(control)[variable]) return void (opened = undefined);
    opened = { control, variable, panel };
    control.setAttribute("aria-expanded", "true");
    panel.querySelector(FOCUSABLE)?.focus();
  });
}

function adopt(control) {
  control.setAttribute("role", "button");
  control.tabIndex = 0;
  const name = NAMES[variableOf(control)];
  if (name && !control.matches(".font-medium")) control.setAttribute("aria-label", name);
  control.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    press(control);
  });
}

// In a narrow window each row of a list is a card, and unfold labels the first cell as the box that selects the row.
const rows = document.querySelector("#result_list tbody")?.parentElement;
const heading = rows?.querySelector("thead th:not(:has(input))");

function labelFirstCells() {
  for (const cell of rows.querySelectorAll("tbody tr > td:first-child[data-label]:not(:has(input[type=checkbox]))")) cell.dataset.label = wordsOf(heading);
}

if (heading) {
  labelFirstCells();
  new MutationObserver(labelFirstCells).observe(rows, { childList: true, subtree: true });
}

// Django's two lists of groups or permissions disable their buttons. Say why, for screen readers and on hover.
const REASONS = { add: "No row of the left list is selected.", remove: "No row of the right list is selected.",
  add_all: "The left list has no rows.", remove_all: "The right list has no rows." };

function explainDisabled(button, reason) {
  button.title = button.disabled ? reason.textContent : "";
  if (button.disabled) button.setAttribute("aria-describedby", reason.id);
  else button.removeAttribute("aria-describedby");
}

function explainSelectorButtons() {
  for (const [name, text] of Object.entries(REASONS)) {
    for (const button of document.querySelectorAll(`.selector button[id$="_${name}"]`)) {
      const reason = Object.assign(document.createElement("span"), { id: `${button.id}_reason`, hidden: true, textContent: text });
      button.after(reason);
      explainDisabled(button, reason);
      new MutationObserver(() => explainDisabled(button, reason)).observe(button, { attributeFilter: ["disabled"] });
    }
  }
}

// Django's script makes the buttons when the page has loaded.
if (document.readyState === "complete") explainSelectorButtons();
else addEventListener("load", explainSelectorButtons);

for (const control of document.querySelectorAll("[x-on\\:click]:not(a[href], button, input, select, textarea, #changelist-filter-close)")) adopt(control);
nameIcons();
// A form begins at its first wrong field, the form for a new row at its first field. Django's own script for the latter
// often runs before the form is there.
const isNew = document.getElementById("django-admin-form-add-constants");
const first = document.querySelector(`#content .errors ${FIELD}`) ?? (isNew && document.querySelector(`#content form[id$=_form] ${FIELD}`));
if (document.activeElement === document.body) first?.focus();
addEventListener("keydown", event => {
  if (event.key !== "Escape" || !opened) return;
  const { control } = opened;
  close();
  control.focus();
}, true);
addEventListener("focusin", event => {
  if (opened && !opened.panel.contains(event.target) && event.target !== opened.control) close();
});
