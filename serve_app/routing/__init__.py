"""Names that the router of version 0.1.0 looks up; needed only to go back to that version.

Ray sends the router's class by value to every living ingress when a deployment changes. An ingress
of this version never runs the class of 0.1.0, but it has to be able to load it.
"""
