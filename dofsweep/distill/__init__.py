"""Training of students: plain torch loops, without Ray."""
