"""Work on files without a server: read, embed, write, and go on where it stopped."""
