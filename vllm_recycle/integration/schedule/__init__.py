"""Which drafts a step verifies: their room, their sizes and their grammars."""
