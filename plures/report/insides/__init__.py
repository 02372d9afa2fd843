"""What is inside models: the pictures of their own that methods and add-ons bring for a report, one file for each.

A method names its function in `Method.insides`, here or in any other package; `base` says what it is given and gives.
"""
