// The forms of the API pages. Each sends JSON, as other clients do, and shows the answer.
function body(form) {
  const whole = form.querySelector("[data-body]");
  if (whole) { return JSON.parse(whole.value); }
  const sent = {};
  form.querySelectorAll("[name]").forEach(function (input) {
    if (input.name === "csrfmiddlewaretoken" || input.value === input.defaultValue && form.dataset.method === "PATCH") { return; }
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

async function send(form) {
  const method = form.dataset.method;
  const headers = {
    "Accept": "application/json",
    "X-CSRFToken": form.elements.csrfmiddlewaretoken.value,
  };
  const options = {method: method, headers: headers, credentials: "same-origin"};
  if (form.querySelector("[data-body], [name]:not([name=csrfmiddlewaretoken])")) {
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body(form));
  }
  const response = await fetch(form.dataset.url, options);
  const text = await response.text();
  const answer = text && /json/.test(response.headers.get("Content-Type") || "") ? JSON.parse(text) : {};
  if (!response.ok) { say(form, response.status + " – " + sentence(answer), "bad"); return; }
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
    button.disabled = true;
    say(form, "Sending…", "");
    send(form)
      .catch(function (error) { say(form, "Not sent: " + error.message, "bad"); })
      .finally(function () { button.disabled = false; });
  });
});

// Empty filters are left out of the address.
document.querySelectorAll("form[data-filter]").forEach(function (form) {
  form.addEventListener("submit", function () {
    form.querySelectorAll("[name]").forEach(function (input) { input.disabled = !input.value; });
  });
});
