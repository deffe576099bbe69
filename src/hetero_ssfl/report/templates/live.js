"use strict";
const main = document.querySelector("main"), connection = document.getElementById("connection");

function replace(place, html) {  // what the reader has opened and scrolled stays so
  const open = [...place.querySelectorAll("details")].map(each => each.open);
  const across = [...place.querySelectorAll(".scroll, pre")].map(each => each.scrollLeft);
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((each, k) => { each.open = open[k] ?? false; });
  place.querySelectorAll(".scroll, pre").forEach((each, k) => { each.scrollLeft = across[k] ?? 0; });
}

function show({title, state, over, order, parts}) {
  document.title = document.getElementById("title").textContent = title;
  connection.textContent = over ? "The run has ended, and this page with it. To see it again: hetero-ssfl watch RUN" : state;
  const places = order.map(name => {
    const place = document.getElementById("live-" + name) || document.createElement("div");
    place.id = "live-" + name;
    if (name in parts) replace(place, parts[name]);
    return place;
  });
  if (places.length !== main.children.length || places.some((place, k) => place !== main.children[k])) main.replaceChildren(...places);
}

function follow() {
  const source = new EventSource("events" + location.search);
  source.onmessage = message => {
    const news = JSON.parse(message.data);
    show(news);
    if (news.over) source.close();
  };
  source.onerror = () => {
    connection.textContent = "The connection is lost. Trying again …";
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
  };
}

follow();
