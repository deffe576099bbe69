"""Tables, figures and HTML pages from run folders."""
