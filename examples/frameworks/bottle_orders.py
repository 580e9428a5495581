"""waitress-serve examples.frameworks.bottle_orders:application"""

from bottle import Bottle, request, response

from flask_runonce import RunOnceMiddleware


def order(item: str) -> dict[str, str]:
    response.status = 201
    return {"ordered": item, "note": request.body.read().decode()}


app = Bottle()
app.route("/orders/<item>", "POST", order)
application = RunOnceMiddleware(app)
