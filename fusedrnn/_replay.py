def tangents(*a): raise RuntimeError("todo")
def second_order(*a): raise RuntimeError("todo")
