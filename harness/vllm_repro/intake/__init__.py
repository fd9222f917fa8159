"""An upstream issue's text as a draft scenario file. Pure: text in, text out; nothing of the text is run."""
