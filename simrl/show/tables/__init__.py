"""Tables on the screen: a file a subject."""
