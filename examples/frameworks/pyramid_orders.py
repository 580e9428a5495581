"""waitress-serve examples.frameworks.pyramid_orders:application"""

from pyramid.config import Configurator
from pyramid.request import Request

from flask_runonce import RunOnceMiddleware


def order(request: Request) -> dict[str, str]:
    request.response.status_int = 201
    return {"ordered": request.matchdict["item"], "note": request.body_file.read().decode()}


with Configurator() as config:
    config.add_route("order", "/orders/{item}", request_method="POST")
    config.add_view(order, route_name="order", renderer="json")
    app = config.make_wsgi_app()
application = RunOnceMiddleware(app)
