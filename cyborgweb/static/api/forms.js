// The forms of the API pages. Each sends JSON, as other clients do, and shows the answer.
// The words for the outcomes of a preview; the console and the command line use the same.
const OUTCOME_WORDS = { moved: "will be done", unchanged: "already so" };

// The value that an input had when the page was loaded; only a list of choices has no defaultValue.
function initialValue(input) {
  if (!input.options) { return input.defaultValue; }
  const chosen = Array.from(input.options).find(function (option) { return option.defaultSelected; });
  return (chosen || input.options[0]).value;
}

function body(form) {
  const whole = form.querySelector("[data-body]");
  if (whole) { return JSON.parse(whole.value); }
  const sent = {};
  form.querySelectorAll("[name]").forEach(function (input) {
    const isUnchanged = input.value === initialValue(input) && form.dataset.method === "PATCH";
    if (input.name === "csrfmiddlewaretoken" || isUnchanged && !("always" in input.dataset)) { return; }
    if (!input.value && !input.required && form.dataset.method === "POST") { return; }
    sent[input.name] = input.dataset.kind === "json" ? JSON.parse(input.value) : input.value;
  });
  return sent;
}

function sentence(answer) {
  if (answer.error) { return answer.error.message; }
  try { return JSON.parse(answer.error_message).faultstring; } catch (error) { return answer.error_message || "It was refused."; }
}

function say(form, text, tone) {
  const line = document.createElement("p");
  line.className = tone;
  line.textContent = text;
  form.querySelector("output").replaceChildren(line);
}

// Show the forecasts of a preview, with a button that sends the request again with the token of the preview.
function showPreview(form, text, preview, sent) {
  say(form, text, preview.confirm ? "bad" : "");
  const list = document.createElement("ul");
  preview.forecast.forEach(function (one) {
    const item = document.createElement("li");
    const word = OUTCOME_WORDS[one.outcome] || one.outcome;
    item.textContent = one.number + " × " + word + ": " + one.text + (one.held ? " (held)" : "");
    list.append(item);
  });
  const button = document.createElement("button");
  button.type = "button";
  button.className = "button danger";
  button.textContent = "Confirm: do this";
  button.addEventListener("click", function () { submit(form, Object.assign({}, sent, {token: preview.token}), button); });
  form.querySelector("output").append(list, button);
}

// The form is based on an older version: show a link to this page with the present one.
function offerPresentVersion(form) {
  const line = document.createElement("p"), link = document.createElement("a");
  link.href = location.href;
  link.textContent = "Show the present version";
  line.append(link, ", then make your change again.");
  form.querySelector("output").append(line);
}

async function send(form, confirmed) {
  const method = form.dataset.method;
  const headers = {
    "Accept": "application/json",
    "X-CSRFToken": form.elements.csrfmiddlewaretoken.value,
  };
  const options = {method: method, headers: headers, credentials: "same-origin"};
  const hasBody = form.querySelector("[data-body], [name]:not([name=csrfmiddlewaretoken])");
  const sent = confirmed || (hasBody ? body(form) : {});
  if (hasBody || confirmed) {
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(sent);
  }
  const response = await fetch(form.dataset.url, options);
  const text = await response.text();
  const answer = text && /json/.test(response.headers.get("Content-Type") || "") ? JSON.parse(text) : {};
  const preview = answer.preview || (sent.dry_run && answer.token ? answer : null);
  if (preview && preview.token) {
    const again = Object.assign({}, sent);
    delete again.dry_run;
    showPreview(form, response.status + " – " + (response.ok ? "Nothing was done." : sentence(answer)), preview, again);
    return;
  }
  if (!response.ok) {
    say(form, response.status + " – " + sentence(answer), "bad");
    if (answer.current) { offerPresentVersion(form); }
    return;
  }
  say(form, response.status + " – done.", "good");
  const made = response.status === 201 && (answer.url || (answer.links || [{}])[0].href);
  location.assign(form.dataset.then || made || location.href);
}

document.querySelectorAll("form[data-method]").forEach(function (form) {
  form.addEventListener("submit", function (event) {
    event.preventDefault();
    const button = form.querySelector("button");
    if ("danger" in form.dataset && button.dataset.sure === undefined) {
      button.dataset.sure = "";
      button.textContent = button.textContent + ": sure?";
      return;
    }
    submit(form, null, button);
  });
});

function submit(form, confirmed, button) {
  button.disabled = true;
  say(form, "Sending…", "");
  send(form, confirmed)
    .catch(function (error) { say(form, "Not sent: " + error.message, "bad"); })
    .finally(function () { button.disabled = false; });
}

// Empty filters are left out of the address.
document.querySelectorAll("form[data-filter]").forEach(function (form) {
  form.addEventListener("formdata", function (event) {
    Array.from(event.formData).forEach(function ([name, value]) { if (!value) { event.formData.delete(name); } });
  });
});
