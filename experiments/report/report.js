"use strict";
const choice = document.getElementById("category");
choice.parentElement.hidden = false;
choice.addEventListener("change", () => {
  for (const request of document.querySelectorAll("details.request")) {
    request.hidden = choice.value !== "" && request.dataset.category !== choice.value;
  }
});
