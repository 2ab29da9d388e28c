"""`cyborg-agent check`: the preflight that an operator runs on a host before it joins, or when something is wrong."""
