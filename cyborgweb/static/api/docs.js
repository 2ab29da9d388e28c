// Run Swagger UI on the page of the documentation, with our OpenAPI document and the session of the user.
const place = document.getElementById("swagger");
SwaggerUIBundle({
  url: place.dataset.schema,
  domNode: place,
  deepLinking: true,
  defaultModelsExpandDepth: -1,
  docExpansion: "list",
  displayRequestDuration: true,
  persistAuthorization: false,
  validatorUrl: null,
  requestInterceptor: function (request) {
    const token = document.cookie.match(/(?:^|; )csrftoken=([^;]+)/);
    if (token && !/^(GET|HEAD)$/i.test(request.method || "GET")) { request.headers["X-CSRFToken"] = token[1]; }
    return request;
  },
});
