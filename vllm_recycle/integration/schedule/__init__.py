"""What a step verifies: room, sizes and grammars of drafts."""
