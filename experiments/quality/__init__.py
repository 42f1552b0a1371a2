"""Quality of answers, per kind of request: a judge a file, each a pure function of the request and the text.

`registry` says which judges a request gets and pools what they found; nothing here runs a model. The libraries stand in
the extra `quality` and are imported when a judge needs them.
"""
