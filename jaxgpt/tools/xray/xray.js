// The X-ray page: the activations of one text, which Python computed.

begin(() => {
  for (const [name, ids] of Object.entries(data.texts)) texts[name] = array(ids);
  drawPage();
});
