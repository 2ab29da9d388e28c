// Buttons that copy the text of another element. A page without HTTPS has no clipboard: there, the text is selected.
for (const button of document.querySelectorAll("[data-copies]")) {
  const source = document.getElementById(button.dataset.copies), result = button.nextElementSibling;
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      result.textContent = "Copied.";
    } catch (error) {
      getSelection().selectAllChildren(source);
      result.textContent = "The browser does not allow this page to copy. The text is selected: press Ctrl+C.";
    }
  });
}
