// The controllers of JobSets and of Kubeflow's TrainJobs, without their webhooks: those only check
// and complete what is created, and would need certificates that the API server trusts.
package main

import (
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlpkg "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	jobsetcontrollers "sigs.k8s.io/jobset/pkg/controllers"
	schedulerplugins "sigs.k8s.io/scheduler-plugins/apis/scheduling/v1alpha1"

	trainer "github.com/kubeflow/trainer/v2/pkg/apis/trainer/v1alpha1"
	trainercontroller "github.com/kubeflow/trainer/v2/pkg/controller"
	trainerruntime "github.com/kubeflow/trainer/v2/pkg/runtime/core"
)

func must(err error) {
	if err != nil {
		ctrl.Log.Error(err, "cannot go on")
		os.Exit(1)
	}
}

func main() {
	ctrl.SetLogger(zap.New())
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, trainer.AddToScheme, jobset.AddToScheme, schedulerplugins.AddToScheme,
	} {
		must(add(scheme))
	}
	manager, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:                 scheme,
		Client:                 client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0",
	})
	must(err)
	ctx := ctrl.SetupSignalHandler()
	must(jobsetcontrollers.SetupJobSetIndexes(ctx, manager.GetFieldIndexer()))
	must(jobsetcontrollers.NewJobSetReconciler(
		manager.GetClient(), scheme, manager.GetEventRecorderFor("jobset"),
	).SetupWithManager(manager))
	runtimes, err := trainerruntime.New(ctx, manager.GetClient(), manager.GetFieldIndexer())
	must(err)
	_, err = trainercontroller.SetupControllers(manager, runtimes, ctrlpkg.Options{})
	must(err)
	must(manager.Start(ctx))
}
